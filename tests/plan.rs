//! What the plan decides where no flag does.

mod common;

use std::path::Path;

use deltafin::engine::{Engine, EngineOptions, Survey};
use deltafin::trunk::TrunkFormat;

fn survey(change: impl FnOnce(&mut EngineOptions)) -> Survey {
    let mut options = EngineOptions::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-model"), 1000);
    change(&mut options);
    Engine::survey(&options).expect("a plan")
}

#[test]
fn a_step_takes_the_whole_prompt_and_no_more() {
    assert_eq!(survey(|_| {}).step_rows, 1000, "as many as there is context");
    assert_eq!(survey(|options| options.prompt = Some(700)).step_rows, 700);
    assert_eq!(survey(|options| options.prompt = Some(0)).step_rows, 1);
    assert_eq!(survey(|options| options.prompt = Some(1020)).step_rows, 1000);
    let asked = survey(|options| (options.prompt, options.step) = (Some(700), Some(64)));
    assert_eq!(asked.step_rows, 64);
}

#[test]
fn a_step_leaves_most_of_little_memory_to_the_experts() {
    let ample = survey(|_| {});
    let rest = ample.plan.total - ample.plan.experts - ample.plan.activations;
    // What the largest step's buffers take, once for them and the experts together.
    let limit = rest + ample.plan.activations;
    let little = survey(|options| options.memory = Some(limit));
    assert!(little.step_rows < ample.step_rows, "{} rows", little.step_rows);
    assert!(little.plan.activations <= (limit - rest) / 4, "{:?}", little.plan);
    assert!(little.plan.total <= limit, "{:?}", little.plan);
    // A step that is asked for is not changed.
    let asked = survey(|options| (options.memory, options.step) = (Some(2 * limit), Some(1000)));
    assert_eq!(asked.step_rows, 1000);
}

#[test]
fn a_refusal_names_the_smaller_forms_of_a_large_trunk() {
    let k3 = tempfile::tempdir().expect("a directory");
    common::k3::write(k3.path());
    let forms = ["bf12 (lossless)", "int8 (approximated)"].map(|form| format!("--trunk {form} needs "));
    let hint = |trunk| {
        let mut options = EngineOptions::new(k3.path(), 16);
        (options.memory, options.trunk) = (Some(1 << 20), trunk);
        let error = Engine::survey(&options).err().expect("one MiB is not enough");
        error.hint_text().expect("a hint").to_owned()
    };
    for (trunk, named) in
        [(None, [true, true]), (Some(TrunkFormat::Bf12), [false, true]), (Some(TrunkFormat::Int8), [false, false])]
    {
        let hint = hint(trunk);
        assert_eq!(forms.each_ref().map(|form| hint.contains(form.as_str())), named, "{trunk:?}: {hint}");
    }
}
