//! Prints the program a checkpoint becomes, one operation a line, from its headers alone.
//!
//!     explain MODEL [--f32]

use metrale::engine;
use metrale::options::{Compute, LoadOptions};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let exact = words.iter().any(|w| w == "--f32");
    let Some(model) = words.iter().find(|w| !w.starts_with('-')) else {
        eprintln!("usage: explain MODEL [--f32]");
        std::process::exit(2);
    };
    let options = LoadOptions { compute: exact.then_some(Compute::F32), ..LoadOptions::default() };
    match engine::explain(model.as_ref(), &options) {
        Ok(text) => print!("{text}"),
        Err(e) => {
            eprintln!("explain: {e}");
            std::process::exit(1);
        }
    }
}
