//! Forms of the trunk: bf12 changes no bit, int8 a little and says so; files of both are used, and refused when damaged.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use deltafin::engine::{Engine, EngineOptions};
use deltafin::interrupt::Interrupt;
use deltafin::kernels::Compute;
use deltafin::trunk::TrunkFormat;

const MODELS: [&str; 4] =
    ["tests/golden/tiny-k3", "tests/golden/odd-k3", "tests/golden/tiny-kimi-linear", "assets/demo-model"];

fn options(model: &str) -> EngineOptions {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join(model);
    EngineOptions { memory: Some(1 << 30), threads: Some(1), ..EngineOptions::new(dir, 128) }
}

fn ids(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + i * i * 11) % 240).collect()
}

/// All logits of some rows at once and of some one by one.
fn logits(options: &EngineOptions) -> Vec<f32> {
    let engine = Engine::open(options, &(), &Interrupt::new()).expect("the model opens");
    let mut session = engine.session().expect("a session");
    let mut all = Vec::new();
    let each = &mut |_, row: &[f32]| {
        all.extend(row);
        Ok(())
    };
    session.feed_all(&ids(40), &(), each).expect("logits");
    for id in [7, 3] {
        all.extend(session.feed(&[id], &()).expect("decode"));
    }
    all
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn bf12_gives_the_bits_of_bf16_on_any_instruction_set_and_threads() {
    for model in MODELS {
        let plain = logits(&options(model));
        for isa in Compute::available() {
            let options = EngineOptions { isa: Some(isa), trunk: Some(TrunkFormat::Bf12), ..options(model) };
            assert!(same_bits(&logits(&options), &plain), "{model}: {isa}");
        }
        let threads = EngineOptions { threads: Some(3), trunk: Some(TrunkFormat::Bf12), ..options(model) };
        assert!(same_bits(&logits(&threads), &plain), "{model}: 3 threads");
    }
}

#[test]
fn int8_gives_the_same_bits_on_any_instruction_set_and_stays_near_bf16() {
    for model in MODELS {
        let of = |isa| logits(&EngineOptions { isa, trunk: Some(TrunkFormat::Int8), ..options(model) });
        let (plain, quantized) = (logits(&options(model)), of(None));
        let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
        let off = square(&mut plain.iter().zip(&quantized).map(|(a, b)| f64::from(a - b)));
        let error = (off / square(&mut plain.iter().map(|v| f64::from(*v)))).sqrt();
        println!("{model}: logits off by {error:.4} of their size");
        // Random models choose other experts at the smallest change; only the trained one can be held to a bound.
        assert!(error < if model.contains("demo") { 0.1 } else { 1.0 }, "{model}: {error}");
        for isa in Compute::available() {
            assert!(same_bits(&of(Some(isa)), &quantized), "{model}: {isa}");
        }
    }
}

#[test]
fn the_plan_shrinks_with_the_form() {
    let trunk = |trunk| {
        let options = EngineOptions { trunk, ..options(MODELS[3]) };
        Engine::survey(&options).expect("a plan").plan.trunk as f64
    };
    let plain = trunk(None);
    assert_eq!(trunk(Some(TrunkFormat::Bf16)), plain);
    let (bf12, int8) = (trunk(Some(TrunkFormat::Bf12)) / plain, trunk(Some(TrunkFormat::Int8)) / plain);
    println!("of bf16: bf12 {bf12:.3}, int8 {int8:.3}");
    assert!(bf12 < 0.85 && int8 < 0.7, "{bf12} {int8}");
}

/// Runs the program in `dir`.
fn run(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltafin"));
    command.args(args).current_dir(dir).output().expect("the program starts")
}

fn model() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-model").display().to_string()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Mean negative log-likelihood of `text`.
fn nll(text: &str, args: &[&str]) -> f64 {
    let model = model();
    let all = [&["logits", "-m", &model, "--nll", "-p", text, "--memory", "1GiB"], args].concat();
    let output = run(Path::new("."), &all);
    assert!(output.status.success(), "{}", stderr(&output));
    let lines = String::from_utf8(output.stdout).expect("text");
    let figure = lines.lines().find_map(|line| line.strip_prefix("nll ")).expect("a likelihood");
    figure.parse().expect("a number")
}

/// Texts of the kind that the model was made for: drawn from its own distribution.
#[test]
fn perplexity_of_the_demo_model_changes_little_with_int8_and_not_with_bf12() {
    let begin = "Once upon a time, there was a";
    let model = model();
    let (mut plain, mut int8) = (0.0, 0.0);
    for seed in ["1", "2", "3", "4"] {
        let args = ["run", "-m", &model, "-p", begin, "-n", "400", "--temperature", "1", "--seed", seed];
        let story = String::from_utf8(run(Path::new("."), &args).stdout).expect("text");
        let story = format!("{begin}{story}");
        let bf16 = nll(&story, &[]);
        assert_eq!(nll(&story, &["--trunk", "bf12"]), bf16);
        plain += bf16 / 4.0;
        int8 += nll(&story, &["--trunk", "int8"]) / 4.0;
    }
    let change = (int8 - plain).exp() - 1.0;
    println!("perplexity: bf16 {:.4}, int8 (quantized) {:.4}: {:+.3} %", plain.exp(), int8.exp(), 100.0 * change);
    assert!(change.abs() < 0.03, "{change}");
}

#[test]
fn results_name_the_form_and_a_quantized_trunk_is_said_once() {
    for (form, label) in [("bf16", "bf16"), ("bf12", "bf12"), ("int8", "int8 (quantized)")] {
        let model = model();
        let args = ["run", "-m", &model, "-p", "One day", "-n", "2", "--output", "json", "--trunk", form];
        let output = run(Path::new("."), &args);
        assert!(output.status.success(), "{}", stderr(&output));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(json["trunk"], label);
        assert_eq!(stderr(&output).matches("quantized").count(), usize::from(form == "int8"), "{}", stderr(&output));
    }
}

/// A root with trunk files of both forms.
fn packed() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().join("root");
    let model = model();
    for form in ["bf12", "int8"] {
        let args = ["pack", "-m", &model, "--to", "root", "--trunk", form, "--rate", "root=1"];
        let output = run(dir.path(), &args);
        assert!(output.status.success(), "{}", stderr(&output));
    }
    (dir, root)
}

#[test]
fn a_packed_trunk_gives_the_bits_of_one_converted_at_load_and_a_damaged_one_is_refused() {
    let (_dir, root) = packed();
    for format in [TrunkFormat::Bf12, TrunkFormat::Int8] {
        let converted = EngineOptions { trunk: Some(format), ..options(MODELS[3]) };
        let from_file = EngineOptions { experts: vec![root.clone()], ..converted.clone() };
        assert!(same_bits(&logits(&converted), &logits(&from_file)), "{}", format.name());

        let path = root.join(format!("trunk.{}", format.name()));
        let whole = std::fs::read(&path).expect("a trunk file");
        let refused = |bytes: &[u8], case: &str| {
            std::fs::write(&path, bytes).expect("written");
            match Engine::open(&from_file, &(), &Interrupt::new()) {
                Err(error) => assert_eq!(error.kind().exit_code(), 3, "{case}: {error}"),
                Ok(_) => panic!("{case}: {} opened", path.display()),
            }
        };
        let end = whole.len();
        let table = u64::from_le_bytes(whole[8..16].try_into().expect("eight bytes")) as usize;
        let table: serde_json::Value = serde_json::from_slice(&whole[16..16 + table]).expect("a table");
        let of = |tensor: usize, key| table["tensors"][tensor][key].as_u64().expect("a number") as usize;
        let last = table["tensors"].as_array().expect("tensors").len() - 1;
        let data = of(0, "offset");
        let in_tensors = [0, last / 2, last].map(|at| [of(at, "offset"), of(at, "offset") + of(at, "len") - 1]);
        for at in [0, 7, 12, 20, 60].into_iter().chain(in_tensors.into_iter().flatten()).chain([data + 4, data + 7]) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x55;
            refused(&bytes, &format!("byte {at} of {end}"));
        }
        for len in [0, 10, 500, data, end - 1] {
            refused(&whole[..len], &format!("{len} of {end} bytes"));
        }
        refused(&[&whole[..], &[0]].concat(), "a byte more");
        std::fs::write(&path, whole).expect("written");
    }
    let foreign = EngineOptions {
        experts: vec![root.clone()],
        trunk: Some(TrunkFormat::Bf12),
        ..options("tests/golden/tiny-k3")
    };
    assert!(Engine::open(&foreign, &(), &Interrupt::new()).is_err_and(|error| error.kind().exit_code() == 3));
}
