//! How text is cut into words before merging, by the name a GGUF file gives (`tokenizer.ggml.pre`).
//!
//! A GGUF file holds no regular expressions, only a name that stands for the `pre_tokenizer` of the model's original
//! `tokenizer.json`. Each row below is such a pre-tokenizer: digits first or not, regular expressions that cut one after
//! the other, and whether a word that is itself a token skips the merges. Names that are not here are refused, since a
//! wrong cut gives wrong ids without any other sign.

use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::punctuation::Punctuation;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::{PreTokenizerWrapper, SplitDelimiterBehavior};

use crate::error::{Error, Kind, Result};

/// One pre-tokenizer.
#[derive(Clone, Copy)]
pub(super) struct Rule {
    steps: &'static [Step],
    /// Text is brought to Unicode's composed form first.
    pub(super) nfc: bool,
    /// A word that is a token is taken whole.
    pub(super) ignore_merges: bool,
    /// Whether a text begins with the begin token when the file does not say.
    pub(super) add_bos: bool,
}

#[derive(Clone, Copy)]
enum Step {
    /// Cut out every match.
    Cut(&'static str),
    /// Each digit alone, or runs of digits.
    EachDigit,
    DigitRuns,
    /// Runs of punctuation.
    Signs,
    /// GPT-2's own expression.
    Gpt2,
}
use Step::*;

const PLAIN: Rule = Rule { steps: &[Gpt2], nfc: false, ignore_merges: false, add_bos: false };
const LLAMA3: Rule = Rule { steps: &[Cut(LLAMA3_WORDS)], ignore_merges: true, add_bos: true, ..PLAIN };
const QWEN2: Rule = Rule { steps: &[Cut(QWEN2_WORDS)], nfc: true, ..PLAIN };
const O200K: Rule = Rule { steps: &[Cut(O200K_WORDS)], ignore_merges: true, ..PLAIN };

/// The rule of a name. Files without a name, and those that say `default`, get GPT-2's, which the first converters assumed.
pub(super) fn rule(name: &str) -> Result<Rule> {
    Ok(match name {
        "" | "default" | "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling" | "exaone4" | "jina-es"
        | "jina-de" | "jina-v2-es" | "jina-v2-de" | "jina-v2-code" | "gigachat" | "a.x-4.0" | "mellum" | "roberta-bpe" => PLAIN,
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2" => LLAMA3,
        "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => Rule { ignore_merges: false, add_bos: false, ..LLAMA3 },
        "qwen2" | "deepseek-r1-qwen" | "megrez" => QWEN2,
        "stablelm2" | "hunyuan" | "solar-open" | "grok-2" => Rule { nfc: false, ..QWEN2 },
        "qwen35" => Rule { steps: &[Cut(QWEN35_WORDS)], nfc: true, ..PLAIN },
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" => {
            Rule { steps: &[EachDigit, Gpt2], ..PLAIN }
        }
        "falcon" => Rule { steps: &[Signs, Gpt2, DigitRuns, Cut("[0-9][0-9][0-9]")], ..PLAIN },
        "deepseek-llm" => {
            Rule { steps: &[Cut("[\r\n]"), Cut(DEEPSEEK_LETTERS), Cut(DEEPSEEK_SIGNS), Cut(r"\s+$"), Cut(CJK), EachDigit], ..PLAIN }
        }
        "deepseek-coder" => Rule { steps: &[Cut("[\r\n]"), Cut(r"\s?\p{L}+"), Cut(r"\s?\p{P}+"), Cut(CJK), EachDigit], ..PLAIN },
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" => {
            Rule { steps: &[Cut(r"\p{N}{1,3}"), Cut("[一-龥\u{3040}-ゟ゠-ヿ]+"), Cut(DEEPSEEK_V3_WORDS)], ..PLAIN }
        }
        "tekken" => Rule { steps: &[Cut(TEKKEN_WORDS)], ignore_merges: true, add_bos: true, ..PLAIN },
        "gpt-4o" | "llama4" | "minimax-m2" => O200K,
        "kimi-k2" => Rule { steps: &[Cut(KIMI_WORDS)], ..PLAIN },
        "seed-coder" => Rule { steps: &[Cut(SEED_CODER_WORDS)], ..PLAIN },
        "bailingmoe" | "bailingmoe2" | "llada-moe" => Rule { steps: &[Cut(BAILING_WORDS)], ..PLAIN },
        "bloom" | "poro-chat" | "gpt3-finnish" => Rule { steps: &[Cut(BLOOM_WORDS)], ..PLAIN },
        "viking" => Rule { steps: &[Cut(BLOOM_WORDS), EachDigit], ..PLAIN },
        other => {
            let text = format!("tokenizer.ggml.pre is '{other}', a pre-tokenizer this build does not know");
            return Err(Error::new(Kind::Unsupported, text).named("tokenizer.ggml.pre"));
        }
    })
}

impl Rule {
    /// The pre-tokenizer: the steps, then bytes to letters.
    pub(super) fn build(&self) -> Result<PreTokenizerWrapper> {
        let mut parts: Vec<PreTokenizerWrapper> = Vec::new();
        let mut letters = ByteLevel::new(false, true, false);
        for (at, step) in self.steps.iter().enumerate() {
            match *step {
                Cut(regex) => {
                    let split = Split::new(SplitPattern::Regex(regex.to_string()), SplitDelimiterBehavior::Isolated, false)
                        .map_err(|e| Error::new(Kind::Internal, format!("pre-tokenizer {regex}: {e}")))?;
                    parts.push(split.into());
                }
                EachDigit => parts.push(Digits::new(true).into()),
                DigitRuns => parts.push(Digits::new(false).into()),
                Signs => parts.push(Punctuation::new(SplitDelimiterBehavior::Contiguous).into()),
                // At the end it is done together with the letters.
                Gpt2 if at + 1 == self.steps.len() => letters = letters.use_regex(true),
                Gpt2 => {
                    let split = Split::new(SplitPattern::Regex(GPT2_WORDS.to_string()), SplitDelimiterBehavior::Isolated, false)
                        .map_err(|e| Error::new(Kind::Internal, format!("pre-tokenizer {GPT2_WORDS}: {e}")))?;
                    parts.push(split.into());
                }
            }
        }
        parts.push(letters.into());
        Ok(Sequence::new(parts).into())
    }
}

const GPT2_WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3_WORDS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35_WORDS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED_CODER_WORDS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const BAILING_WORDS: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const BLOOM_WORDS: &str = r" ?[^(\s|[.,!?…。，、।۔،])]+";
const O200K_WORDS: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const TEKKEN_WORDS: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const KIMI_WORDS: &str = concat!(
    r"[\p{Han}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const DEEPSEEK_V3_WORDS: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"##,
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Letters that have case, in the Unicode version the model was made with, after at most one blank.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}",
    r"\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}",
    r"\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}",
    r"\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}",
    r"\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}",
    r"\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}",
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}",
    r"\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}",
    r"\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}",
    r"\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}",
    r"\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+"
);
const DEEPSEEK_SIGNS: &str = r"\s?[!-/:-~！-／：-～‘-‟　-。]+";
const CJK: &str = "[一-龥ࠀ-一가-\u{D7FF}]+";

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::tokenizer::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    /// The words of a text, as they stand in the text.
    fn words<'a>(name: &str, text: &'a str) -> Vec<&'a str> {
        let mut pieces = PreTokenizedString::from(text);
        rule(name).unwrap().build().unwrap().pre_tokenize(&mut pieces).unwrap();
        pieces.get_splits(OffsetReferential::Original, OffsetType::Byte).iter().map(|(_, (a, b), _)| &text[*a..*b]).collect()
    }

    #[test]
    fn cuts_by_name() {
        // Worked out by hand from each expression.
        let cases: &[(&str, &str, &[&str])] = &[
            ("gpt-2", "I've 123  x\n\n", &["I", "'ve", " 123", " ", " x", "\n\n"]),
            ("llama-bpe", "I'VE 12345 x;\n", &["I", "'VE", " ", "123", "45", " x", ";\n"]),
            ("qwen2", "a 12\r\nb", &["a", " ", "1", "2", "\r\n", "b"]),
            ("smollm", "a12 3", &["a", "1", "2", " ", "3"]),
            ("tekken", "HelloWorld 12", &["Hello", "World", " ", "1", "2"]),
            ("gpt-4o", "HelloWorld's 1234", &["Hello", "World's", " ", "123", "4"]),
            ("deepseek-v3", "ab漢字かな1234 .x", &["ab", "漢字かな", "123", "4", " .", "x"]),
            ("deepseek-llm", "ab cd\n1 漢", &["ab", " cd", "\n", "1", " ", "漢"]),
            ("deepseek-coder", "ab +1", &["ab", " +", "1"]),
            ("kimi-k2", "漢字abc Def1234", &["漢字", "abc", " Def", "123", "4"]),
            ("falcon", "a,b 1234", &["a", ",", "b", " ", "123", "4"]),
            ("viking", "ab cd, 12", &["ab", " cd", ",", " ", "1", "2"]),
            ("bailingmoe", "it's 12", &["it", "'s", " ", "1", "2"]),
        ];
        for (name, text, expected) in cases {
            assert_eq!(&words(name, text), expected, "{name}");
        }
    }

    #[test]
    fn every_name_builds_and_loses_nothing() {
        let names = "default gpt-2 llama-bpe dbrx qwen2 stablelm2 qwen35 smollm falcon deepseek-llm deepseek-coder deepseek-v3 tekken \
                     gpt-4o kimi-k2 seed-coder bailingmoe bloom viking";
        let text = "Ünï 12345's  \r\n\t漢字かな 한국어 ⛄👩‍👩‍👧 e\u{301} <|x|> ١٢٣ \u{2581}";
        for name in names.split_whitespace() {
            assert_eq!(words(name, text).concat(), text, "{name}");
        }
    }

    #[test]
    fn unknown_names_are_refused_by_name() {
        let error = rule("klingon-bpe").err().unwrap();
        assert_eq!((error.kind(), error.name()), (Kind::Unsupported, Some("tokenizer.ggml.pre")));
        assert!(error.message().contains("klingon-bpe"));
    }
}
