//! A conversation as the segments of a prompt, in the order of `encoding_k3.py`.

use serde_json::{Map, Value};

use super::json::{Style, dumps};
use super::message::{Content, FunctionCall, Message, Part};
use super::options::{ChatOptions, Effort, ResponseFormat, ToolChoice};
use super::results::in_call_order;
use super::{CLOSE, END_OF_MSG, OPEN, SEP, Segment};
use crate::error::{Error, Result};
use crate::text::classes::is_python_space;

const IMAGE_PLACEHOLDER: &str = "<|kimi_image_placeholder|>";

const TOOLS: &str = "# Tools\nHere are the available tools, described in JSONSchema.\n\n";
const MORE_TOOLS: &str = "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n\
                          You have access to all existing and extended tools.\n\
                          Here are the specs for the extended tools.\n\n";
const EFFORT: &str = "`thinking_effort` guides on how much to think in your thinking channel (not including the \
                      response channel), supported values include `low`, `medium`, `high`, and `max`.\n\
                      Now the system is invoked with `thinking_effort=";
const TOOL_REQUIRED: &str =
    "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.";
const NO_TOOL: &str =
    "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.";
const RAW_JSON: &str =
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting.";

/// The prompt of `messages`, as segments.
///
/// # Errors
/// Kind `Usage`, naming the message: a role other than system, user, assistant and tool (the official code drops such
/// messages without a word), images without image prompts or in another number, arguments that are no object, a tool
/// result that belongs to no call.
pub fn render(messages: &[Message], options: &ChatOptions) -> Result<Vec<Segment>> {
    let mut prompt = Prompt { segments: Vec::new(), options, images_used: 0, calls: Vec::new(), results: 0 };
    if !options.tools.is_empty() {
        prompt.note("tool-declare", &(TOOLS.to_owned() + &fenced_tools(&options.tools)));
    }
    if let Some(effort) = options.thinking_effort.filter(|_| options.thinking) {
        prompt.note("thinking-effort", &effort_note(effort));
    }
    for (at, message) in in_call_order(messages).iter().enumerate() {
        prompt.message(message).map_err(|error| error.context(format!("messages[{at}]")))?;
    }
    prompt.all_images_used()?;
    match options.tool_choice {
        ToolChoice::Auto => {}
        ToolChoice::Required => prompt.note("tool-choice", TOOL_REQUIRED),
        ToolChoice::None => prompt.note("tool-choice", NO_TOOL),
    }
    if let Some(note) = response_format_note(&options.response_format) {
        prompt.note("response-format", &note);
    }
    if options.add_generation_prompt {
        prompt.open("message", &[("role", "assistant")]);
        prompt.open(if options.thinking { "think" } else { "response" }, &[]);
    }
    Ok(prompt.segments)
}

fn effort_note(effort: Effort) -> String {
    format!("{EFFORT}{}`.", effort.name())
}

fn response_format_note(format: &ResponseFormat) -> Option<String> {
    let invoked = |kind: &str| format!("The system is invoked with `response_format={kind}`.\n{RAW_JSON}");
    match format {
        ResponseFormat::Text => None,
        ResponseFormat::JsonObject => Some(invoked("json_object")),
        ResponseFormat::JsonSchema(schema) => {
            let schema = fenced(&dumps(schema, Style::CompactSorted));
            Some(format!("{}\nThe JSON data must match the following schema:\n{schema}", invoked("json_schema")))
        }
    }
}

fn fenced_tools(tools: &[Value]) -> String {
    fenced(&dumps(&Value::Array(tools.to_vec()), Style::CompactSorted))
}

fn fenced(json: &str) -> String {
    format!("```json\n{json}\n```")
}

fn is_blank(text: &str) -> bool {
    text.chars().all(is_python_space)
}

/// The prompt so far.
struct Prompt<'o> {
    segments: Vec<Segment>,
    options: &'o ChatOptions,
    images_used: usize,
    /// Tools called by the last assistant message.
    calls: Vec<String>,
    /// Results rendered since.
    results: usize,
}

impl Prompt<'_> {
    fn control(&mut self, text: &str) {
        self.segments.push(Segment { text: text.to_owned(), control: true });
    }

    fn text(&mut self, text: &str) {
        if !text.is_empty() {
            self.segments.push(Segment { text: text.to_owned(), control: false });
        }
    }

    fn open(&mut self, tag: &str, attributes: &[(&str, &str)]) {
        self.control(OPEN);
        self.text(tag);
        for (key, value) in attributes {
            self.text(&format!(" {key}"));
            self.text("=\"");
            self.text(&value.replace('&', "&amp;").replace('"', "&quot;"));
            self.text("\"");
        }
        self.control(SEP);
    }

    fn close(&mut self, tag: &str) {
        self.control(CLOSE);
        self.text(tag);
        self.control(SEP);
    }

    fn end_message(&mut self) {
        self.close("message");
        self.control(END_OF_MSG);
    }

    /// A message that the renderer adds.
    fn note(&mut self, kind: &str, body: &str) {
        self.open("message", &[("role", "system"), ("type", kind)]);
        self.text(body.trim_matches(is_python_space));
        self.end_message();
    }

    fn message(&mut self, message: &Message) -> Result<()> {
        match message.role.as_str() {
            "system" if !message.tools.is_empty() => {
                self.note("tool-declare", &(MORE_TOOLS.to_owned() + &fenced_tools(&message.tools)));
                Ok(())
            }
            "system" | "user" => self.plain(message),
            "assistant" => self.assistant(message),
            "tool" => self.tool_result(message),
            role => Err(Error::usage(format!("role: expected system, user, assistant or tool, found `{role}`"))
                .hint("send instructions of other roles as `system`")),
        }
    }

    fn open_message(&mut self, message: &Message) {
        let name = message.name.as_deref().unwrap_or_default();
        let attributes = [("role", message.role.as_str()), ("name", name)];
        self.open("message", &attributes[..if name.is_empty() { 1 } else { 2 }]);
    }

    fn plain(&mut self, message: &Message) -> Result<()> {
        self.open_message(message);
        self.content(&message.content)?;
        self.end_message();
        Ok(())
    }

    fn assistant(&mut self, message: &Message) -> Result<()> {
        self.open_message(message);
        if self.options.thinking {
            let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
            let reasoning = given(&message.reasoning_content).or_else(|| given(&message.reasoning)).unwrap_or_default();
            self.open("think", &[]);
            self.text(if is_blank(&reasoning) { "" } else { &reasoning });
            self.close("think");
        }
        self.open("response", &[]);
        self.content(&message.content)?;
        self.close("response");
        if !message.tool_calls.is_empty() {
            self.open("tools", &[]);
            for (index, call) in (1..).zip(&message.tool_calls) {
                self.call(index, &call.function)
                    .map_err(|error| error.context(format!("tool_calls[{}]", index - 1)))?;
            }
            self.close("tools");
        }
        self.end_message();
        self.calls = message.tool_calls.iter().map(|call| call.function.name.clone()).collect();
        self.results = 0;
        Ok(())
    }

    fn call(&mut self, index: usize, function: &FunctionCall) -> Result<()> {
        self.open("call", &[("tool", &function.name), ("index", &index.to_string())]);
        match &function.arguments {
            Value::Null => {}
            Value::Object(arguments) => self.arguments(arguments),
            Value::String(text) if is_blank(text) => {}
            Value::String(text) => match serde_json::from_str(text) {
                Ok(Value::Object(arguments)) => self.arguments(&arguments),
                Ok(other) => return Err(not_an_object(&other)),
                // Kept as it is: the model sees what it wrote.
                Err(_) => {
                    self.open("json", &[("type", "object")]);
                    self.text(text);
                    self.close("json");
                }
            },
            other => return Err(not_an_object(other)),
        }
        self.close("call");
        Ok(())
    }

    fn arguments(&mut self, arguments: &Map<String, Value>) {
        for (key, value) in arguments {
            let (kind, text) = match value {
                Value::Bool(_) => ("boolean", dumps(value, Style::Spaced)),
                Value::Null => ("null", dumps(value, Style::Spaced)),
                Value::Number(_) => ("number", dumps(value, Style::Spaced)),
                Value::String(text) => ("string", text.clone()),
                Value::Object(_) => ("object", dumps(value, Style::Spaced)),
                Value::Array(_) => ("array", dumps(value, Style::Spaced)),
            };
            self.open("argument", &[("key", key), ("type", kind)]);
            self.text(&text);
            self.close("argument");
        }
    }

    fn tool_result(&mut self, message: &Message) -> Result<()> {
        let given = |name: &Option<String>| name.clone().filter(|name| !name.is_empty());
        let name = given(&message.tool)
            .or_else(|| given(&message.name))
            .or_else(|| self.calls.get(self.results).cloned())
            .ok_or_else(|| {
                Error::usage("a tool result without a name, and no tool call that it could answer")
                    .hint("give it the `tool_call_id` of a call in the assistant message before it, or a `name`")
            })?;
        self.results += 1;
        let index = self.results.to_string();
        self.open("message", &[("role", "tool"), ("tool", &name), ("index", &index)]);
        self.content(&message.content)?;
        self.end_message();
        Ok(())
    }

    fn content(&mut self, content: &Content) -> Result<()> {
        match content {
            Content::None => Ok(()),
            Content::Text(text) => self.body(text),
            Content::Parts(parts) => parts.iter().try_for_each(|part| match part {
                Part::Text(text) => self.body(text),
                Part::Image if self.options.image_prompts.is_some() => self.image(),
                Part::Image => Err(Error::usage("content: an image, but only text can be read")
                    .hint("leave the image out, or describe it in words")),
            }),
        }
    }

    /// Text, in which placeholders stand for images when there are image prompts.
    fn body(&mut self, text: &str) -> Result<()> {
        if self.options.image_prompts.is_none() {
            self.text(text);
            return Ok(());
        }
        for (at, part) in text.split(IMAGE_PLACEHOLDER).enumerate() {
            if at > 0 {
                self.image()?;
            }
            self.text(part);
        }
        Ok(())
    }

    fn image(&mut self) -> Result<()> {
        let prompts = self.options.image_prompts.as_deref().unwrap_or_default();
        let Some(prompt) = prompts.get(self.images_used) else {
            return Err(Error::usage(format!("content: more images than the {} image prompts given", prompts.len())));
        };
        self.images_used += 1;
        self.control(prompt);
        Ok(())
    }

    fn all_images_used(&self) -> Result<()> {
        let (used, given) = (self.images_used, self.options.image_prompts.as_deref().unwrap_or_default().len());
        if used == given {
            return Ok(());
        }
        Err(Error::usage(format!("{given} image prompts given, but the messages hold {used} images")))
    }
}

fn not_an_object(arguments: &Value) -> Error {
    Error::usage(format!("arguments: expected an object or its JSON, found {arguments}"))
}
