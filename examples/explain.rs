//! Prints the program a checkpoint becomes, one operation a line, from its headers alone.
//!
//!     explain MODEL [--f32] [--device N]

use metrale::engine;
use metrale::options::{Compute, LoadOptions};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let exact = words.iter().any(|w| w == "--f32");
    let on_device = words.iter().position(|w| w == "--device");
    let device = on_device.map_or(Some(0), |at| words.get(at + 1)?.parse().ok());
    let model = words.iter().enumerate().find(|(at, w)| !w.starts_with('-') && on_device.is_none_or(|n| *at != n + 1)).map(|(_, w)| w);
    let (Some(model), Some(device)) = (model, device) else {
        eprintln!("usage: explain MODEL [--f32] [--device N]");
        std::process::exit(2);
    };
    let options = LoadOptions { device, compute: exact.then_some(Compute::F32), ..LoadOptions::default() };
    match engine::explain(model.as_ref(), &options) {
        Ok(text) => print!("{text}"),
        Err(e) => {
            eprintln!("explain: {e}");
            std::process::exit(1);
        }
    }
}
