//! `explain`: a circuit as text, one operation a line.

use super::tape::{Circuit, Declared};
use crate::ops::{Port, Rows};
use std::fmt::Write;

/// One line for each operation: layer, name, fields, and the shapes it reads and writes.
pub fn explain(circuit: &Circuit, declared: &dyn Declared) -> String {
    let mut text = String::new();
    let mut nodes = circuit.nodes.clone();
    for node in &mut nodes {
        let layer = node.layer.map_or_else(|| "-".into(), |l| l.to_string());
        let fields = format!("{:?}", node.op);
        let mut shapes = String::new();
        for (port, value) in node.op.ports() {
            let info = &circuit.values[value.0 as usize];
            let rows = if info.shape.rows == Rows::All { "rows" } else { "seqs" };
            let arrow = if port == Port::In { "<-" } else { "->" };
            let name = info.name.as_ref().map_or_else(String::new, |n| format!(" {n}"));
            let _ = write!(shapes, " {arrow} {value:?}[{rows}, {}]{name}", info.shape.width);
        }
        let _ = writeln!(text, "{layer:>4} {:<12}{shapes}    {}", node.op.name(), named_weights(&fields, declared));
    }
    text
}

/// Puts weight names where the fields' text has `WeightId(n)`.
fn named_weights(fields: &str, declared: &dyn Declared) -> String {
    let mut out = String::new();
    let mut rest = fields;
    while let Some(at) = rest.find("WeightId(") {
        out.push_str(&rest[..at]);
        rest = &rest[at + "WeightId(".len()..];
        let end = rest.find(')').unwrap_or(0);
        match rest[..end].parse() {
            Ok(id) => out.push_str(declared.weight_name(crate::ops::WeightId(id))),
            Err(_) => out.push_str(&rest[..end]),
        }
        rest = rest.get(end + 1..).unwrap_or("");
    }
    out + rest
}
