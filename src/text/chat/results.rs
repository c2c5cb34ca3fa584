//! Tool results: brought into the order of their calls before rendering, since the prompt carries no call ids.

use super::message::{Message, ToolCall};

/// `messages` with each run of consecutive `tool` messages sorted by the calls they answer, when all of a run answer
/// calls of the most recent assistant message; they then carry the called tool's name. Other runs stay as they came.
pub fn in_call_order(messages: &[Message]) -> Vec<Message> {
    let mut ordered = Vec::with_capacity(messages.len());
    let mut calls: &[ToolCall] = &[];
    for run in messages.chunk_by(|a, b| a.role == "tool" && b.role == "tool") {
        if run[0].role == "tool" {
            ordered.extend(sorted(run, calls).unwrap_or_else(|| run.to_vec()));
            continue;
        }
        if run[0].role == "assistant" {
            calls = &run[0].tool_calls;
        }
        ordered.extend_from_slice(run);
    }
    ordered
}

fn sorted(run: &[Message], calls: &[ToolCall]) -> Option<Vec<Message>> {
    let mut matched = Vec::with_capacity(run.len());
    for message in run {
        let given = |id: &Option<String>| id.clone().filter(|id| !id.is_empty());
        let id = given(&message.tool_call_id).or_else(|| given(&message.id))?;
        let at = calls.iter().position(|call| call.id.as_ref() == Some(&id))?;
        matched.push((at, Message { tool: Some(calls[at].function.name.clone()), ..message.clone() }));
    }
    matched.sort_by_key(|(at, _)| *at);
    Some(matched.into_iter().map(|(_, message)| message).collect())
}
