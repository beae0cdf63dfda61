#!/usr/bin/env python3
"""Makes tests/fixtures/text: strings, token ids and rendered chats that src/text is compared with.

    python3 tests/support/make_text_fixtures.py MODELS GOLDEN

MODELS holds one folder per model with model.gguf and hf/; GOLDEN holds <model>.json with prompts and their ids.
Needs the Python packages tokenizers and jinja2, which are the reference: ids come from Python's tokenizers on
hf/tokenizer.json, chats from Jinja set up the way transformers does it.
"""
import json
import os
import shutil
import struct
import sys

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

NAMES = ["stories260k", "smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct"]

STRINGS = [
    "", " ", "  ", "a", "Hello, world!", "Hello  world", " leading", "trailing ", "\n", "\n\n", "\r\n\r\n", "\t\tx\t", "   \n   ",
    "Once upon a time, there was a little girl named Lily.", "I'VE we'll it's DON'T they'd y'all", "CamelCaseWords and snake_case_words",
    "1234567890", "3.14159 -2e10 0xFF 1,000,000", "١٢٣٤ ४५६ ⅷ ²³", "x=1;y=2;  z = x+y  # sum", "def f(x):\n    return x ** 2\n",
    "for (int i = 0; i < n; ++i) {\n\t\ta[i] = b[i];\n}\n", "<html><body class=\"x\">&amp;</body></html>", "{\"a\": [1, 2, {\"b\": null}]}",
    "https://example.com/a?b=c&d=%20#e", "user@example.com", "😀", "😀😃😄", "👩‍👩‍👧‍👦 family", "👍🏽", "🇩🇪🇯🇵", "⛄ snow", "日本語のテキスト", "中文字符测试，标点。",
    "한국어 텍스트", "नमस्ते दुनिया", "สวัสดีชาวโลก", "שלום עולם", "مرحبا بالعالم", "‏RTL‎ marks", "Привет, мир!", "Ελληνικά", "Tiếng Việt",
    "é", "e\u0301", "Å Å Å", "ﬁ ﬂ", "ñandú NFC n\u0303andu\u0301", "\u1100\u1161\u11a8", "\u2581", "a\u2581b \u2581", "\u00a0nbsp\u2003em\u3000ideographic",
    "\u0000\u0001\u001f\u007f", "\ufeffBOM", "\ufffd \ufffe", "a\u200bb\u200cc\u200dd", "<s>", "</s> text <unk>", "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|>", " <|im_end|> ", "<bos><start_of_turn>user\nx<end_of_turn>", "<unused5> <0x41> <0xZZ>", "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
    "<tool_call>\n{}\n</tool_call>", "<|im_start|", "a" * 300, "ab" * 200, " " * 70, "\n" * 40, "." * 90, "=" * 33 + "-" * 65, "\\n \\u0041 \\\\",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐐀𐐨", "∑∫√≠≤ ← ↑ →", "“quotes” ‘single’ – — …", "ÀÈÌÒÙ àèìòù ÇÑß", "The quick brown fox jumps over the lazy dog.",
]

CHATS = {
    "user": dict(messages=[dict(role="user", content="What is 2 + 2?")]),
    "system": dict(messages=[dict(role="system", content="Be brief.\n\"Quote\" & <tag>."), dict(role="user", content="Hé! 😀")]),
    "turns, no prompt": dict(add_generation_prompt=False, messages=[
        dict(role="user", content="a"), dict(role="assistant", content="b"), dict(role="system", content="late"), dict(role="user", content="c")]),
    "tools": dict(
        messages=[
            dict(role="system", content="You call tools."), dict(role="user", content="Weather in Zürich?"),
            dict(role="assistant", content="", tool_calls=[dict(type="function", function=dict(name="weather", arguments=dict(
                city="Zürich", days=3, exact=True, min=-1.5, unit=None, tags=["a", "b\n"])))]),
            dict(role="tool", content="{\"t\": 20}"), dict(role="tool", content="second"), dict(role="assistant", content="20 degrees."),
            dict(role="user", content="Thanks")],
        tools=[dict(type="function", function=dict(name="weather", description="It's <b>the</b> weather & more", parameters=dict(
            type="object", properties=dict(city=dict(type="string"), days=dict(type="integer", default=1)), required=["city"]))),
            dict(type="function", function=dict(name="nothing", parameters={}))]),
    "tools, no system": dict(messages=[dict(role="user", content="x")], tools=[dict(type="function", function=dict(name="f"))]),
}


def gguf_metadata(path):
    """The tokenizer entries of a GGUF file's header."""
    scalar = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    with open(path, "rb") as f:
        def unpack(code):
            return struct.unpack("<" + code, f.read(struct.calcsize("<" + code)))[0]

        def value(kind):
            if kind == 8:
                return f.read(unpack("Q")).decode()
            if kind == 9:
                item, count = unpack("I"), unpack("Q")
                return [value(item) for _ in range(count)]
            return unpack(scalar[kind])

        assert f.read(4) == b"GGUF" and unpack("I") == 3
        unpack("Q")
        pairs = [(value(8), value(unpack("I"))) for _ in range(unpack("Q"))]
    return {k: v for k, v in pairs if k.startswith("tokenizer.")}


def render(source, conf, messages, tools=None, add_generation_prompt=True):
    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    tokens = {k: conf[k] for k in ("bos_token", "eos_token") if k in conf}
    return env.from_string(source).render(messages=messages, tools=tools, documents=None,
                                          add_generation_prompt=add_generation_prompt, **tokens)


def main(models, golden):
    out = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures", "text")
    os.makedirs(os.path.join(out, "stories260k"), exist_ok=True)
    ids, prompts, chats = {}, {}, []
    for name in NAMES:
        hf = os.path.join(models, name, "hf")
        reference = Tokenizer.from_file(os.path.join(hf, "tokenizer.json"))
        ids[name] = [reference.encode(s, add_special_tokens=True).ids for s in STRINGS]
        prompts[name] = json.load(open(os.path.join(golden, name + ".json")))["prompts"]
        conf = json.load(open(os.path.join(hf, "tokenizer_config.json")))
        if "chat_template" in conf:
            for title, chat in CHATS.items():
                tokens = {k: conf.get(k, "") for k in ("bos_token", "eos_token")}
                chats.append(dict(model=name, title=title, template=conf["chat_template"], **tokens, **chat,
                                  expected=render(conf["chat_template"], conf, **chat)))

    def dump(name, value):
        with open(os.path.join(out, name), "w", encoding="utf-8") as f:
            json.dump(value, f, ensure_ascii=True, separators=(",", ":"))
            f.write("\n")

    dump("strings.json", dict(strings=STRINGS, ids=ids))
    dump("prompts.json", prompts)
    dump("chats.json", chats)
    dump("stories260k/gguf.json", gguf_metadata(os.path.join(models, "stories260k", "model.gguf")))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(os.path.join(models, "stories260k", "hf", name), os.path.join(out, "stories260k", name))


if __name__ == "__main__":
    main(*sys.argv[1:])
