//! Fused circuits against the circuit as recorded, and against every operation's definition, for each family.

mod support;

use metrale::circuit::RULES;
use metrale::engine::{self, Bodies};
use metrale::options::{Compute, LoadOptions};
use support::golden::{Golden, folders};

#[test]
fn fusion_keeps_the_bits_and_definitions_agree() {
    assert!(RULES.iter().all(|rule| rule.exact), "a rule that changes bits needs a tolerance here");
    let only = std::env::var("METRALE_ONLY").unwrap_or_default();
    let mut checked = 0;
    for path in folders() {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !only.is_empty() && !only.split(',').any(|o| o == name) {
            continue;
        }
        for compute in [Compute::F32, Compute::Fast] {
            let options = LoadOptions { compute: Some(compute), threads: 2, ..LoadOptions::default() };
            let Ok(engine) = engine::load(&path, &options, None) else { continue };
            if engine.has_encoder() {
                continue; // tests/nllb.rs does the same for models that translate
            }
            let prompt = &Golden::read(&path).prompt[..20];
            let run = |bodies| {
                let captured = match engine.has_encoder() {
                    true => engine.capture_translation(prompt, prompt, 16, &["logits"], bodies),
                    false => engine.capture(prompt, 16, &["logits"], bodies),
                };
                captured.unwrap_or_else(|e| panic!("{name}: {e}")).remove(0).values
            };
            let fused = run(Bodies::Fast);
            let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert!(bits(&fused) == bits(&run(Bodies::Unfused)), "{name} {compute:?}: fusion changes bits");
            // Definitions sum in f64: in exact arithmetic they differ by rounding. 8-bit activations round differently where a
            // last bit differs, so there only the exact mode is held to the definitions.
            if compute == Compute::F32 {
                let defined = run(Bodies::Definition);
                let most = fused.iter().zip(&defined).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
                assert!(most < 1e-3, "{name}: the fast bodies are {most} from the definitions");
            }
            checked += 1;
        }
    }
    println!("{checked} engines checked");
    assert!(checked > 0);
}
