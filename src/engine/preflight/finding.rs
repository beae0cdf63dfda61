//! Findings, and the one error they become: most telling first, alike ones as one line.
//!
//! A checkpoint with one wrong number in its config departs from it in hundreds of tensors. Names that differ in numbers only
//! (`model.layers.3.mlp.experts.7.up_proj`) and of which the same is to be said share a line.

use crate::error::{Error, Kind};
use std::collections::{BTreeSet, HashMap};

/// What a finding is about, the most telling first: what stands higher often explains what stands lower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Class {
    /// A quantisation this build does not read.
    Quantisation,
    /// A key of the config.
    Config,
    /// The number of layers.
    Layers,
    /// The number of experts.
    Experts,
    /// A tensor of another shape.
    Shape,
    /// A tensor that is not there.
    Missing,
    /// A tensor that cannot be used as it is stored.
    Tensor,
    /// A tensor that is there and that the config does not ask for.
    Unasked,
}

/// One thing that is wrong.
#[derive(Clone, Debug)]
pub(crate) struct Finding {
    pub class: Class,
    pub kind: Kind,
    /// The tensor or key.
    pub name: String,
    /// What was found and what was expected; `{}` stands for the name.
    pub text: String,
    /// What helps; may be empty.
    pub help: String,
    /// Where it came as an error, which is handed on whole if nothing else is found.
    error: Option<Error>,
}

impl Finding {
    pub fn new(class: Class, kind: Kind, name: impl Into<String>, text: impl Into<String>) -> Finding {
        Finding { class, kind, name: name.into(), text: text.into(), help: String::new(), error: None }
    }

    /// Adds what helps.
    pub fn help(mut self, help: impl Into<String>) -> Finding {
        self.help = help.into();
        self
    }

    /// An error that arose while looking, about `name` where the error itself names nothing.
    pub fn from_error(class: Class, name: &str, error: Error) -> Finding {
        let name = error.name().unwrap_or(name).to_string();
        let message = error.message().replace('{', "(").replace('}', ")");
        let text = if name.is_empty() { message } else { message.replace(&name, "{}") };
        Finding { class, kind: error.kind(), name, text, help: String::new(), error: Some(error) }
    }
}

/// Findings of which the same is to be said.
struct Group {
    first: Finding,
    /// Numbers in the names, in order, of each finding.
    numbers: Vec<Vec<usize>>,
    pattern: String,
}

/// Most lines of one error; what is wrong with a checkpoint that has more shows in these.
const MOST_LINES: usize = 24;

/// The error for all findings; `None` where there are none.
pub(crate) fn report(findings: Vec<Finding>) -> Option<Error> {
    let mut groups: Vec<Group> = Vec::new();
    let mut index: HashMap<(Class, String, String, String), usize> = HashMap::new();
    for finding in findings {
        let (pattern, numbers) = pattern(&finding.name);
        let key = (finding.class, pattern.clone(), finding.text.clone(), finding.help.clone());
        match index.get(&key) {
            Some(&at) => groups[at].numbers.push(numbers),
            None => {
                index.insert(key, groups.len());
                groups.push(Group { first: finding, numbers: vec![numbers], pattern });
            }
        }
    }
    groups.sort_by_key(|group| group.first.class);
    let first = &groups.first()?.first;
    if groups.len() == 1
        && groups[0].numbers.len() == 1
        && let Some(error) = &first.error
    {
        return Some(if error.name().is_some() || first.name.is_empty() { error.clone() } else { error.clone().named(&first.name) });
    }
    let mut text = match groups.len() {
        1 => groups[0].line(),
        n => format!("{n} findings:"),
    };
    if groups.len() > 1 {
        for group in groups.iter().take(MOST_LINES) {
            text.push_str("\n- ");
            text.push_str(&group.line());
        }
        if groups.len() > MOST_LINES {
            text.push_str(&format!("\n- and {} more", groups.len() - MOST_LINES));
        }
    }
    let error = Error::new(first.kind, text);
    Some(if first.name.is_empty() { error } else { error.named(&first.name) })
}

impl Group {
    fn line(&self) -> String {
        let name = self.names();
        let mut line = self.first.text.replace("{}", &name);
        if !self.first.help.is_empty() {
            line.push_str("; ");
            line.push_str(&self.first.help);
        }
        line
    }

    /// All names as one, where they are every combination of some numbers; else the first and how many more.
    fn names(&self) -> String {
        let distinct: BTreeSet<&Vec<usize>> = self.numbers.iter().collect();
        if distinct.len() == 1 {
            return self.first.name.clone();
        }
        let places = self.numbers[0].len();
        let columns: Vec<BTreeSet<usize>> = (0..places).map(|i| self.numbers.iter().map(|n| n[i]).collect()).collect();
        let all = columns.iter().fold(1usize, |n, column| n.saturating_mul(column.len()));
        if all != distinct.len() {
            return format!("{} (and {} others like it)", self.first.name, distinct.len() - 1);
        }
        let mut columns = columns.iter();
        let words = self.pattern.split('.').map(|word| match word {
            "*" => columns.next().map_or_else(String::new, ranges),
            word => word.to_string(),
        });
        words.collect::<Vec<_>>().join(".")
    }
}

/// A name with `*` for its numbers, and the numbers.
fn pattern(name: &str) -> (String, Vec<usize>) {
    let mut numbers = Vec::new();
    let words = name.split('.').map(|word| match word.parse() {
        Ok(n) => {
            numbers.push(n);
            "*"
        }
        Err(_) => word,
    });
    (words.collect::<Vec<_>>().join("."), numbers)
}

/// `{0..3,5}`; a single number stands by itself.
pub(super) fn ranges(numbers: &BTreeSet<usize>) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &n in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == n => *last = n,
            _ => runs.push((n, n)),
        }
    }
    let text: Vec<String> = runs.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}..{b}") }).collect();
    if numbers.len() == 1 { text.concat() } else { format!("{{{}}}", text.join(",")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(name: &str) -> Finding {
        Finding::new(Class::Missing, Kind::CorruptFile, name, "there is no {}")
    }

    #[test]
    fn names_that_differ_in_numbers_share_a_line() {
        let names = (0..3).flat_map(|layer| (0..2).map(move |e| format!("model.layers.{layer}.experts.{e}.up")));
        let e = report(names.map(|n| missing(&n)).collect()).unwrap();
        assert_eq!(e.message(), "there is no model.layers.{0..2}.experts.{0..1}.up");
        assert_eq!((e.kind(), e.name()), (Kind::CorruptFile, Some("model.layers.0.experts.0.up")));
        let e = report(vec![missing("l.0.a.1.w"), missing("l.1.a.0.w")]).unwrap();
        assert_eq!(e.message(), "there is no l.0.a.1.w (and 1 others like it)");
        assert_eq!(report(vec![missing("l.7.w")]).unwrap().message(), "there is no l.7.w");
        assert!(report(Vec::new()).is_none());
    }

    #[test]
    fn the_most_telling_comes_first_and_nothing_is_lost() {
        let mut findings: Vec<Finding> = (0..40).map(|i| missing(&format!("a{i}"))).collect();
        findings.push(Finding::new(Class::Layers, Kind::Mismatch, "num_hidden_layers", "{} is 9").help("is it?"));
        let e = report(findings).unwrap();
        assert!(e.message().starts_with("41 findings:\n- num_hidden_layers is 9; is it?\n- there is no a0\n"), "{e}");
        assert!(e.message().ends_with("and 17 more") && e.kind() == Kind::Mismatch, "{e}");
    }

    #[test]
    fn an_error_alone_is_handed_on_whole() {
        let cause = Error::new(Kind::TooLarge, "a {b} c").sizes(3, 2);
        let e = report(vec![Finding::from_error(Class::Tensor, "b", cause.clone())]).unwrap();
        assert_eq!((e.message(), e.wanted(), e.name()), ("a {b} c", Some(3), Some("b")));
        let e = report(vec![Finding::from_error(Class::Tensor, "b", cause), missing("x")]).unwrap();
        assert_eq!(e.message(), "2 findings:\n- there is no x\n- a (b) c");
    }

    #[test]
    fn ranges_are_short() {
        let set = |n: &[usize]| ranges(&n.iter().copied().collect());
        assert_eq!((set(&[4]), set(&[0, 1, 2]), set(&[0, 2, 3, 9])), ("4".into(), "{0..2}".into(), "{0,2..3,9}".into()));
    }
}
