//! The objects that `--output json` prints. Numbers that are not defined are null, never NaN.

use serde::Serialize;

use crate::store::StoreStats;
use crate::text::chat::{Answer, Arguments, ParsedCall};

/// What one run came to.
#[derive(Debug, Clone, Serialize)]
pub struct RunReport {
    /// The answer; null where the model directory has no tokenizer.
    pub text: Option<String>,
    /// What the model thought before it answered (chat only).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Tools that the model called (chat only).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<ToolCall>>,
    /// The new ids, without the one that ended the answer.
    pub ids: Vec<u32>,
    /// `eos`, `length`, `stop_string` or `interrupted`; null when an error ended the run.
    pub stop: Option<&'static str>,
    /// The error that ended the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens in and out.
    pub usage: Usage,
    /// Where the time went.
    pub timings: Timings,
    /// Expert reads.
    pub io: StoreStats,
    /// Memory, planned and used.
    pub memory: Memory,
    /// What computed.
    pub backend: &'static str,
    /// Instruction set in use; null when the model was not yet loaded.
    pub isa: Option<&'static str>,
    /// Threads in use; null when the model was not yet loaded.
    pub threads: Option<usize>,
    /// How the trunk's matrices are held: `bf16`, `bf12` or `int8 (quantized)`; null when the model was not yet loaded.
    pub trunk: Option<&'static str>,
}

/// Tokens in and out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// New tokens, without the one that ended the answer.
    pub completion_tokens: usize,
    /// Both.
    pub total_tokens: usize,
}

impl Usage {
    /// Of a prompt and its answer.
    pub fn new(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }
}

/// Seconds on the monotonic clock, and rates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Timings {
    /// From the prompt's being read to the model's being ready: configuration, tokenizer, trunk; null when it was not.
    pub load_s: Option<f64>,
    /// The prompt's computation, up to the logits after its last token; null when it was not finished.
    pub prefill_s: Option<f64>,
    /// From the prompt's being read to the first chosen token, loading included; null without one.
    pub first_token_s: Option<f64>,
    /// From the first chosen token to the last; null without one.
    pub decode_s: Option<f64>,
    /// Prompt tokens a second of `prefill_s`.
    pub prefill_tps: Option<f64>,
    /// Tokens after the first a second of `decode_s`; null below two tokens. The token that ends an answer counts.
    pub decode_tps: Option<f64>,
}

/// `count / seconds`, where that is a finite number of something.
pub fn rate(count: usize, seconds: Option<f64>) -> Option<f64> {
    let rate = count as f64 / seconds?;
    (count > 0 && rate.is_finite()).then_some(rate)
}

/// Bytes of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Sum of the plan; null when the model was not yet loaded.
    pub planned: Option<u64>,
    /// Largest resident set of the process so far.
    pub peak: u64,
}

/// A tool that the model called.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ToolCall {
    /// The tool.
    pub name: String,
    /// The number that the model gave the call, from 1.
    pub index: Option<u32>,
    /// An object, or the model's own text where that is none.
    pub arguments: serde_json::Value,
    /// False for the call that the answer broke off in.
    pub complete: bool,
}

/// The calls of `answer`, the one that it broke off in last.
pub fn tool_calls(answer: &Answer) -> Vec<ToolCall> {
    let call = |call: &ParsedCall, complete| ToolCall {
        name: call.name.clone(),
        index: call.index,
        arguments: match &call.arguments {
            Arguments::Object(arguments) => serde_json::Value::Object(arguments.clone()),
            Arguments::Raw(text) => serde_json::Value::String(text.clone()),
        },
        complete,
    };
    let complete = answer.tool_calls.iter().map(|it| call(it, true));
    complete.chain(answer.open_call.iter().map(|it| call(it, false))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_without_meaning_are_null() {
        assert_eq!(rate(10, Some(2.0)), Some(5.0));
        assert_eq!(rate(10, Some(0.0)), None);
        assert_eq!(rate(0, Some(0.0)), None);
        assert_eq!(rate(10, None), None);
        let json = serde_json::to_string(&Timings::default()).unwrap();
        assert!(json.contains("\"decode_tps\":null"), "{json}");
    }
}
