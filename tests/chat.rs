//! The chat format against the official renderer's prompts, and the parser on answers.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::sync::OnceLock;

use deltafin::error::Kind;
use deltafin::text::chat::{
    Answer, Arguments, ChatEvent, ChatOptions, ChatParser, Effort, Message, ParsedCall, encode, render,
};
use deltafin::text::{Specials, Tokenizer};
use serde_json::{Value, json};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn k3() -> &'static Tokenizer {
    static K3: OnceLock<Tokenizer> = OnceLock::new();
    K3.get_or_init(|| {
        let file = fs::File::open(root().join("tests/tokenizer/tiktoken.model.gz")).unwrap();
        let mut ranks = Vec::new();
        flate2::read::GzDecoder::new(file).read_to_end(&mut ranks).unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("tiktoken.model"), ranks).unwrap();
        Tokenizer::from_dir(dir.path(), Some(163_840)).unwrap()
    })
}

fn demo() -> Tokenizer {
    Tokenizer::from_dir(&root().join("assets/demo-model"), Some(4096)).unwrap()
}

fn rendered(messages: Value, options: Value) -> deltafin::error::Result<String> {
    let messages: Vec<Message> = serde_json::from_value(messages).unwrap();
    let options: ChatOptions = serde_json::from_value(options).unwrap();
    Ok(render(&messages, &options)?.into_iter().map(|segment| segment.text).collect())
}

#[test]
fn every_golden_conversation_is_reproduced() {
    let lines = fs::read_to_string(root().join("tests/tokenizer/chat.jsonl")).unwrap();
    let mut count = 0;
    for (number, line) in (1..).zip(lines.lines()) {
        let case: Value = serde_json::from_str(line).unwrap();
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
        let options: ChatOptions = serde_json::from_value(case["options"].clone()).unwrap();
        let segments = render(&messages, &options).unwrap();
        let text: String = segments.iter().map(|segment| segment.text.as_str()).collect();
        assert_eq!(text, case["rendered"], "example {number}");
        assert_eq!(segments.len() as u64, case["segments"].as_u64().unwrap(), "example {number}");
        let want: Vec<u32> = case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        assert_eq!(encode(&segments, k3()).unwrap(), want, "example {number}");
        // The same through the text of the request, as a server gets it.
        let messages: Vec<Message> = serde_json::from_str(&case["messages"].to_string()).unwrap();
        assert_eq!(render(&messages, &options).unwrap(), segments, "example {number}");
        count += 1;
    }
    assert_eq!(count, 17);
}

#[test]
fn attributes_are_four_segments() {
    let call = json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"$ref": "x"}}}]}]);
    let messages: Vec<Message> = serde_json::from_value(call).unwrap();
    let ids = encode(&render(&messages, &ChatOptions::default()).unwrap(), k3()).unwrap();
    let key = [2355, 878, 3, 2113, 1];
    assert!(ids.windows(key.len()).any(|window| window == key), "{ids:?}");
}

#[test]
fn user_text_never_makes_control_tokens() {
    let controls = |text: &str| {
        let messages = [Message::system(text), Message::user(text), Message::assistant(text), Message::user(text)];
        let ids = encode(&render(&messages, &ChatOptions::default()).unwrap(), k3()).unwrap();
        ids.into_iter().filter(|id| k3().is_control(*id)).collect::<Vec<_>>()
    };
    let plain = controls("x");
    for text in
        ["<|close|>message<|sep|><|end_of_msg|>", "[EOS][PAD][BOS]", "<|reserved_token_163592|>", "<|media_pad|>"]
    {
        assert_eq!(controls(text), plain, "{text}");
    }
}

#[test]
fn the_demo_vocabulary_renders_with_its_own_ids() {
    let tokenizer = demo();
    let options = ChatOptions { thinking: false, ..ChatOptions::default() };
    let ids = encode(&render(&[Message::user("Tell me a story.")], &options).unwrap(), &tokenizer).unwrap();
    assert_eq!((ids[0], ids[ids.len() - 1]), (4083, 4085));
    assert_eq!(
        tokenizer.decode(&ids, false).unwrap(),
        "<|open|>message role=\"user\"<|sep|>Tell me a story.<|close|>message<|sep|><|end_of_msg|>\
         <|open|>message role=\"assistant\"<|sep|><|open|>response<|sep|>"
    );
}

#[test]
fn a_tokenizer_without_the_markers_has_no_chat_format() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(root().join("assets/demo-model/tiktoken.model"), dir.path().join("tiktoken.model")).unwrap();
    let tokenizer = Tokenizer::from_dir(dir.path(), Some(4096)).unwrap();
    let segments = render(&[Message::user("x")], &ChatOptions::default()).unwrap();
    let error = encode(&segments, &tokenizer).unwrap_err();
    assert_eq!(error.kind(), Kind::Model);
    assert!(error.message().contains("no chat format") && error.message().contains("<|open|>"), "{error}");
    assert_eq!(ChatParser::new(&tokenizer, true).unwrap_err().kind(), Kind::Model);
}

#[test]
fn media_without_media_tokens_is_refused() {
    let options = json!({"image_prompts": ["<|media_begin|>image 1x1<|media_content|><|media_pad|><|media_end|>"]});
    let messages: Vec<Message> =
        serde_json::from_value(json!([{"role": "user", "content": [{"type": "image"}]}])).unwrap();
    let segments = render(&messages, &serde_json::from_value(options).unwrap()).unwrap();
    assert!(encode(&segments, k3()).unwrap().contains(&163_605));
    assert_eq!(encode(&segments, &demo()).unwrap_err().kind(), Kind::Model);
}

#[test]
fn what_cannot_be_rendered_is_refused_with_the_message() {
    let call = |arguments: Value| {
        json!([{"role": "user", "content": "x"},
               {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}])
    };
    let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]);
    let placeholder = json!([{"role": "user", "content": "a <|kimi_image_placeholder|> b"}]);
    for (messages, options, want) in [
        (
            json!([{"role": "developer", "content": "x"}]),
            json!({}),
            "messages[0]: role: expected system, user, assistant or tool, found `developer`",
        ),
        (json!([{"role": "", "content": "x"}]), json!({}), "found ``"),
        (json!([{"role": "tool", "content": "x"}]), json!({}), "messages[0]: a tool result without a name"),
        (
            call(json!([1])),
            json!({}),
            "messages[1]: tool_calls[0]: arguments: expected an object or its JSON, found [1]",
        ),
        (call(json!("5")), json!({}), "arguments: expected an object"),
        (call(json!(true)), json!({}), "arguments: expected an object"),
        (image.clone(), json!({}), "content: an image, but only text can be read"),
        (image.clone(), json!({"image_prompts": []}), "more images than the 0 image prompts"),
        (image, json!({"image_prompts": ["a", "b"]}), "2 image prompts given, but the messages hold 1 images"),
        (placeholder.clone(), json!({"image_prompts": []}), "more images than the 0 image prompts"),
    ] {
        let error = rendered(messages, options).unwrap_err();
        assert_eq!(error.kind(), Kind::Usage, "{want}");
        assert!(error.message().contains(want), "{error}, want {want}");
    }
    assert!(rendered(placeholder, json!({})).unwrap().contains("a <|kimi_image_placeholder|> b"));
}

#[test]
fn requests_of_the_wrong_shape_do_not_deserialize() {
    for message in [
        json!({"content": "x"}),
        json!({"role": "user", "content": 5}),
        json!({"role": "user", "content": [{"text": "x"}]}),
        json!({"role": "user", "content": [{"type": "audio"}]}),
        json!({"role": "user", "content": ["x"]}),
        json!({"role": "user", "tool_calls": [{"name": "f"}]}),
    ] {
        assert!(serde_json::from_value::<Message>(message.clone()).is_err(), "{message}");
    }
    for options in [
        json!({"thinking_effort": "medium"}),
        json!({"thinking_effort": 3}),
        json!({"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        json!({"tool_choice": "any"}),
        json!({"response_format": {"type": "xml"}}),
        json!({"response_format": {"type": "json_schema"}}),
        json!({"tools": {}}),
    ] {
        assert!(serde_json::from_value::<ChatOptions>(options.clone()).is_err(), "{options}");
    }
    assert!("medium".parse::<Effort>().is_err());
    assert_eq!("low".parse::<Effort>().unwrap(), Effort::Low);
}

#[test]
fn nulls_and_absent_keys_are_alike() {
    let bare = rendered(json!([{"role": "assistant", "content": "x"}]), json!({})).unwrap();
    let nulls = json!([{"role": "assistant", "content": "x", "name": null, "tool_calls": null, "tools": null,
        "reasoning_content": null, "reasoning": null, "refusal": null, "tool_call_id": null}]);
    let options = json!({"tools": null, "tool_choice": null, "response_format": null, "image_prompts": null});
    assert_eq!(rendered(nulls, options).unwrap(), bare);
    let auto = json!({"tool_choice": "auto", "response_format": {"type": "text"}, "thinking_effort": "max"});
    assert_eq!(rendered(json!([{"role": "assistant", "content": "x", "name": ""}]), auto).unwrap(), bare);
}

#[test]
fn schemas_are_found_under_either_key_or_none() {
    let note = |schema: Value| {
        let options = json!({"thinking": false, "response_format": {"type": "json_schema", "json_schema": schema}});
        rendered(json!([{"role": "user", "content": "x"}]), options).unwrap()
    };
    let want = note(json!({"schema": {"type": "object"}}));
    assert!(want.contains("```json\n{\"type\":\"object\"}\n```<|close|>message"), "{want}");
    assert_eq!(note(json!({"json_schema": {"type": "object"}})), want);
    assert_eq!(note(json!({"type": "object"})), want);
    let options = json!({"thinking": false, "tool_choice": "none", "response_format": {"type": "json_object"}});
    let text = rendered(json!([]), options).unwrap();
    assert!(text.contains("`tool_choice=none`.\nYou MUST NOT call any tools in the next message.<|close|>"), "{text}");
    assert!(text.contains("`response_format=json_object`.\nYour response must be raw JSON data"), "{text}");
    assert!(text.contains("additional formatting.<|close|>"), "{text}");
}

#[test]
fn reasoning_is_kept_verbatim_but_not_when_blank() {
    let think = |message: Value| rendered(json!([message]), json!({"thinking_effort": null})).unwrap();
    let text = think(json!({"role": "assistant", "reasoning_content": "", "reasoning": " r\n", "content": "c"}));
    assert!(text.contains("think<|sep|> r\n<|close|>think"), "{text}");
    let text = think(json!({"role": "assistant", "reasoning_content": " \n\u{3000}", "content": null}));
    assert!(text.contains("think<|sep|><|close|>think<|sep|><|open|>response<|sep|><|close|>response"), "{text}");
}

#[test]
fn a_run_of_results_is_sorted_only_when_all_of_it_matches() {
    let with = |results: Value| {
        let mut messages = json!([{"role": "assistant", "tool_calls": [
            {"id": "a", "function": {"name": "f"}}, {"id": "b", "function": {"name": "g"}},
            {"id": "a", "function": {"name": "h"}}]}]);
        messages.as_array_mut().unwrap().extend(results.as_array().unwrap().clone());
        let text = rendered(messages, json!({"thinking": false, "add_generation_prompt": false})).unwrap();
        let results: Vec<&str> = text.split("<|open|>message role=\"tool\" ").skip(1).collect();
        results
            .iter()
            .map(|result| result.split("<|close|>").next().unwrap().replace("<|sep|>", ":"))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        with(
            json!([{"role": "tool", "tool_call_id": "b", "content": "1"}, {"role": "tool", "id": "a", "content": "2"},
                    {"role": "tool", "tool_call_id": "a", "content": "3"}])
        ),
        ["tool=\"f\" index=\"1\":2", "tool=\"f\" index=\"2\":3", "tool=\"g\" index=\"3\":1"]
    );
    assert_eq!(
        with(json!([{"role": "tool", "tool_call_id": "b", "name": "own", "content": "1"},
                    {"role": "tool", "tool_call_id": "z", "content": "2"}])),
        ["tool=\"own\" index=\"1\":1", "tool=\"g\" index=\"2\":2"]
    );
    assert_eq!(
        with(json!([{"role": "tool", "tool_call_id": "b", "content": "1"}, {"role": "user", "content": "x"},
                    {"role": "tool", "tool_call_id": "a", "content": "2"}])),
        ["tool=\"g\" index=\"1\":1", "tool=\"f\" index=\"2\":2"]
    );
}

#[test]
fn numbers_of_a_request_keep_their_digits_and_print_as_python_does() {
    let arguments =
        r#"{"i": 123456789012345678901234567890, "f": 1e2, "z": -0, "o": {"e": 1E-7, "b": 18446744073709551616}}"#;
    let want = "key=\"i\" type=\"number\":123456789012345678901234567890|key=\"f\" type=\"number\":100.0\
                |key=\"z\" type=\"number\":0|key=\"o\" type=\"object\":{\"e\": 1e-07, \"b\": 18446744073709551616}";
    for arguments in [arguments.to_owned(), serde_json::to_string(arguments).unwrap()] {
        let message =
            format!(r#"[{{"role":"assistant","tool_calls":[{{"function":{{"name":"f","arguments":{arguments}}}}}]}}]"#);
        let messages: Vec<Message> = serde_json::from_str(&message).unwrap();
        let segments = render(&messages, &ChatOptions::default()).unwrap();
        let text: String = segments.into_iter().map(|segment| segment.text).collect();
        let read: Vec<String> = text
            .split("<|open|>argument ")
            .skip(1)
            .map(|argument| argument.split("<|close|>").next().unwrap().replace("<|sep|>", ":"))
            .collect();
        assert_eq!(read.join("|"), want);
    }
}

fn parsed(tokenizer: &Tokenizer, thinking: bool, ids: &[u32]) -> (Vec<ChatEvent>, Answer) {
    let mut parser = ChatParser::new(tokenizer, thinking).unwrap();
    let mut events: Vec<ChatEvent> = ids.iter().flat_map(|id| parser.push(*id).unwrap()).collect();
    let (last, answer) = parser.finish();
    events.extend(last);
    let joined = |pick: fn(&ChatEvent) -> Option<&String>| events.iter().filter_map(pick).cloned().collect::<String>();
    assert_eq!(
        joined(|event| if let ChatEvent::Reasoning(text) = event { Some(text) } else { None }),
        answer.reasoning
    );
    assert_eq!(joined(|event| if let ChatEvent::Content(text) = event { Some(text) } else { None }), answer.content);
    let calls =
        events.iter().filter_map(|event| if let ChatEvent::ToolCall(call) = event { Some(call.clone()) } else { None });
    assert_eq!(calls.collect::<Vec<_>>(), answer.tool_calls);
    assert_eq!(events.contains(&ChatEvent::End), answer.complete);
    (events, answer)
}

fn answer(thinking: bool, text: &str) -> Answer {
    parsed(k3(), thinking, &k3().encode(text, Specials::Control)).1
}

#[test]
fn the_example_answer_is_read_as_reasoning_and_content() {
    let ids = [
        38, 7673, 1636, 13, 163588, 39964, 163589, 163587, 12092, 163589, 18699, 0, 163588, 12092, 163589, 163588,
        2778, 163589, 163586,
    ];
    let (events, answer) = parsed(k3(), true, &ids);
    assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("Greet back.", "Hi!"));
    assert!(answer.complete && answer.tool_calls.is_empty() && answer.open_call.is_none());
    assert_eq!(events.iter().filter(|event| **event == ChatEvent::End).count(), 1);
}

const CALLS: &str = "<|open|>tools<|sep|><|open|>call tool=\"f&quot;&amp;lt;\" index=\"1\"<|sep|>\
    <|open|>argument key=\"s\" type=\"string\"<|sep|>{\"a\": 1}<|close|>argument<|sep|>\
    <|open|>argument key=\"n\" type=\"number\"<|sep|>123456789012345678901234567890<|close|>argument<|sep|>\
    <|open|>argument key=\"bad\" type=\"object\"<|sep|>{\"a\":<|close|>argument<|sep|><|close|>call<|sep|>\
    <|open|>call tool=\"g\" index=\"2\"<|sep|><|open|>json type=\"object\"<|sep|>{\"city\":<|close|>json<|sep|><|close|>call<|sep|>\
    <|open|>call tool=\"h\" index=\"3\"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>";

fn expect_calls(answer: &Answer) {
    let [f, g, h] = answer.tool_calls.as_slice() else { panic!("{:?}", answer.tool_calls) };
    assert_eq!((f.name.as_str(), f.index), ("f\"&lt;", Some(1)));
    assert_eq!(f.arguments.to_json(), r#"{"s":"{\"a\": 1}","n":123456789012345678901234567890,"bad":"{\"a\":"}"#);
    assert_eq!((g.name.as_str(), &g.arguments), ("g", &Arguments::Raw("{\"city\":".to_owned())));
    assert_eq!((h.name.as_str(), h.arguments.to_json().as_str()), ("h", "{}"));
}

#[test]
fn tool_calls_are_read_with_their_types() {
    let end = "<|close|>message<|sep|><|end_of_msg|>";
    let whole = format!("r<|close|>think<|sep|><|open|>response<|sep|>c<|close|>response<|sep|>{CALLS}{end}");
    let read = answer(true, &whole);
    assert_eq!((read.reasoning.as_str(), read.content.as_str(), read.complete), ("r", "c", true));
    expect_calls(&read);
    // Without the close of `response`, and with an extra open of `think`.
    let read = answer(true, &format!("<|open|>think<|sep|>r<|close|>think<|sep|><|open|>response<|sep|>c{CALLS}{end}"));
    assert_eq!((read.reasoning.as_str(), read.content.as_str()), ("r", "c"));
    expect_calls(&read);
}

#[test]
fn a_rendered_answer_is_read_back() {
    let messages = json!([{"role": "assistant", "reasoning_content": " why \n", "content": "é🙂 <|close|>response",
        "tool_calls": [{"function": {"name": "a\"b&", "arguments": {"x": 1.5, "k\"": "v", "o": {"b": [1, null]}, "t": true}}}]}]);
    let messages: Vec<Message> = serde_json::from_value(messages).unwrap();
    let options = ChatOptions { thinking_effort: None, add_generation_prompt: false, ..ChatOptions::default() };
    for tokenizer in [k3(), &demo()] {
        let ids = encode(&render(&messages, &options).unwrap(), tokenizer).unwrap();
        let read = parsed(tokenizer, true, &ids).1;
        assert_eq!((read.reasoning.as_str(), read.content.as_str()), (" why \n", "é🙂 <|close|>response"));
        let call = &read.tool_calls[0];
        assert_eq!(call.name, "a\"b&");
        assert_eq!(call.arguments.to_json(), r#"{"x":1.5,"k\"":"v","o":{"b":[1,null]},"t":true}"#);
    }
}

#[test]
fn an_answer_cut_anywhere_keeps_what_it_said_and_shows_no_marker() {
    let text = format!("think🙂ing<|close|>think<|sep|><|open|>response<|sep|>ans🙂wer<|close|>response<|sep|>{CALLS}");
    let ids = k3().encode(&text, Specials::Control);
    for end in 0..=ids.len() {
        let read = parsed(k3(), true, &ids[..end]).1;
        let trimmed = |text: &str| text.trim_end_matches('\u{fffd}').to_owned();
        assert!("think🙂ing".starts_with(&trimmed(&read.reasoning)), "{end}: {}", read.reasoning);
        assert!("ans🙂wer".starts_with(&trimmed(&read.content)), "{end}: {}", read.content);
        assert!(!read.complete && read.tool_calls.len() + usize::from(read.open_call.is_some()) <= 3);
    }
    let cut = answer(
        false,
        "c<|open|>tools<|sep|><|open|>call tool=\"f\"<|sep|><|open|>argument key=\"k\" type=\"string\"<|sep|>par",
    );
    let arguments = Arguments::Object(serde_json::from_str(r#"{"k":"par"}"#).unwrap());
    assert_eq!(cut.open_call, Some(ParsedCall { name: "f".into(), index: None, arguments }));
    assert!(cut.tool_calls.is_empty());
}

#[test]
fn a_token_limit_inside_a_character_shows_one_replacement() {
    let ids = k3().encode("🫠", Specials::Ordinary);
    assert!(ids.len() > 1, "{ids:?}");
    assert_eq!(parsed(k3(), false, &ids[..1]).1.content, "\u{fffd}");
    // The same before a marker.
    let mut marked = ids[..1].to_vec();
    marked.extend(k3().encode("<|close|>response<|sep|>", Specials::Control));
    assert_eq!(parsed(k3(), false, &marked).1.content, "\u{fffd}");
}

#[test]
fn odd_structure_does_no_harm() {
    for (text, reasoning, content) in [
        ("a<|sep|>b", "ab", ""),
        ("a<|open|><|open|>response<|sep|>b", "a", "b"),
        ("a<|close|>nonsense<|sep|>b", "ab", ""),
        ("a<|close|>think<|sep|>b", "a", "b"),
        ("a<|close|>think<|sep|>\n\n<|open|>response<|sep|>\nb", "a", "\nb"),
        ("a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>junk", "a", "b"),
        ("a[PAD][BOS]<|reserved_token_163700|>b", "ab", ""),
        ("a<|end_of_msg|>b<|open|>response<|sep|>c", "a", ""),
        ("a<|open|>argument key=\"k\"<|sep|>b", "ab", ""),
        ("<|close|>", "", ""),
        ("<|close|><|close|>think<|sep|><|open|>message role=\"assistant\"<|sep|><|open|>response<|sep|>b", "", "b"),
        ("", "", ""),
    ] {
        let read = answer(true, text);
        assert_eq!((read.reasoning.as_str(), read.content.as_str()), (reasoning, content), "{text}");
    }
    let long = "x ".repeat(5_000);
    let read = answer(false, &format!("a<|open|>{long}b"));
    assert!(read.content.starts_with('a') && read.content.ends_with('b'), "a marker without end hides the rest");
    assert_eq!(ChatParser::new(k3(), true).unwrap().push(163_840).unwrap_err().kind(), Kind::Usage);
}
