//! What a header declares, as lines of a record: functions with their types, constants, types, structs field by field.
//! Offsets and sizes come from a C compiler, which is asked through a small program.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// Key (what it is and its name) to value (what must not change about it).
pub type Facts = BTreeMap<String, String>;

/// A header taken apart.
#[derive(Default)]
pub struct Header {
    pub functions: Facts,
    pub constants: Facts,
    pub types: Facts,
    /// Struct to its fields in order, each a name and a type.
    pub structs: BTreeMap<String, Vec<(String, String)>>,
}

/// Reads the text of a header as cbindgen writes it.
pub fn parse(text: &str) -> Header {
    let mut header = Header::default();
    let text = without_comments(text);
    for line in text.lines().filter_map(|line| line.strip_prefix("#define METRALE_")) {
        if let Some((name, value)) = line.split_once(' ') {
            header.constants.insert(format!("METRALE_{name}"), value.trim().to_string());
        }
    }
    let code: String =
        text.lines().filter(|line| !line.starts_with('#') && !line.contains("extern \"C\"")).map(|line| format!("{line} ")).collect();
    for statement in statements(&code) {
        let statement = statement.split_whitespace().collect::<Vec<_>>().join(" ");
        if let Some(body) = statement.strip_prefix("typedef struct {") {
            let (fields, name) = body.rsplit_once('}').expect("a struct ends");
            let fields = fields.split(';').map(str::trim).filter(|field| !field.is_empty());
            header.structs.insert(name.trim().to_string(), fields.map(field).collect());
        } else if let Some(rest) = statement.strip_prefix("typedef ") {
            header.types.insert(name_of(rest), rest.to_string());
        } else if statement.contains('(') {
            header.functions.insert(name_of(&statement), statement);
        }
    }
    header
}

/// A field's name and type; the type of an array ends with its count.
fn field(text: &str) -> (String, String) {
    let (text, count) = text.split_once('[').map_or((text, String::new()), |(text, count)| (text, format!("[{count}")));
    let at = text.rfind([' ', '*']).expect("a field has a type") + 1;
    (text[at..].to_string(), format!("{}{count}", text[..at].trim()))
}

/// The name that a declaration declares.
fn name_of(declaration: &str) -> String {
    let inside = declaration.split_once("(*").map(|(_, rest)| rest.split(')').next().unwrap_or(rest));
    let head = declaration.split('(').next().unwrap_or(declaration);
    inside.unwrap_or_else(|| head.rsplit([' ', '*']).next().unwrap_or(head)).to_string()
}

fn without_comments(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("/*") {
        out.push_str(before);
        rest = after.split_once("*/").map_or("", |(_, after)| after);
    }
    out.push_str(rest);
    out.lines().map(|line| format!("{}\n", line.split("//").next().unwrap_or(line))).collect()
}

/// Declarations, each without its semicolon.
fn statements(code: &str) -> Vec<String> {
    let (mut depth, mut statement, mut out) = (0, String::new(), Vec::new());
    for c in code.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if c == ';' && depth == 0 {
            out.push(std::mem::take(&mut statement));
        } else {
            statement.push(c);
        }
    }
    out
}

/// The record's lines for the header in `folder`, layouts included; `None` without a C compiler.
pub fn facts(folder: &Path, scratch: &Path) -> Option<Facts> {
    let text = std::fs::read_to_string(folder.join("metrale.h")).expect("the header is there");
    let header = parse(&text);
    let mut facts: Facts = BTreeMap::new();
    for (name, value) in &header.constants {
        facts.insert(format!("constant {name}"), value.clone());
    }
    for (kind, all) in [("function", &header.functions), ("type", &header.types)] {
        facts.extend(all.iter().map(|(name, value)| (format!("{kind} {name}"), value.clone())));
    }
    for line in layouts(folder, &header, scratch)?.lines() {
        let (key, value) = line.split_once(" = ").expect("the program prints facts");
        facts.insert(key.to_string(), value.to_string());
    }
    Some(facts)
}

fn layouts(folder: &Path, header: &Header, scratch: &Path) -> Option<String> {
    let mut source = String::from("#include <stdio.h>\n#include \"metrale.h\"\nint main(void) {\n");
    for (name, fields) in &header.structs {
        source += &format!("printf(\"struct {name} = size %zu\\n\", sizeof({name}));\n");
        for (field, kind) in fields {
            let place = "offset %zu size %zu";
            let sizes = format!("offsetof({name}, {field}), sizeof((({name} *)0)->{field})");
            source += &format!("printf(\"field {name}.{field} = {kind} {place}\\n\", {sizes});\n");
        }
    }
    source += "return 0;\n}\n";
    let program = scratch.join("abi-layout");
    std::fs::write(program.with_extension("c"), source).expect("the folder is writable");
    let built = Command::new("cc").arg("-I").arg(folder).arg(program.with_extension("c")).arg("-o").arg(&program).output().ok()?;
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let shown = Command::new(&program).output().expect("the program starts");
    Some(String::from_utf8(shown.stdout).expect("names are ASCII"))
}
