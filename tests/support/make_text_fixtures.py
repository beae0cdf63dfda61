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

# What chat templates in use are written with; each is rendered for FEATURE_MESSAGES.
FEATURE_MESSAGES = [dict(role="system", content=" Sys\n"), dict(role="user", content="Hi <b>"),
                    dict(role="assistant", content="<think>\nhm\n</think>\n\nYes", n=1.5), dict(role="user", content=[
                        dict(type="text", text="look"), dict(type="image", url="x")])]
FEATURES = r"""
{{ true }} {{ none }} {{ 1.0 }} {{ 1e16 }} {{ 0.00001 }} {{ 123456789012345680.0 }} {{ -0.5 }} {{ nothing }}|
{{ [1, 'a', "it's", none, {'k': true, 'f': 2.50}] }} {{ (1, 2) | list }} {{ {} }} {{ [] }}
{{ messages[2] }} {{ messages[3].content[0] | tojson }}
{{ {'b': [1, 2.5, none], 'a': 'x"\n<&>'} | tojson }} {{ {'b': 1, 'a': []} | tojson(indent=2, sort_keys=true) }}
{{ ['é', 1, {}] | tojson(separators=(',', ':'), ensure_ascii=true) }} {{ {'a': {'b': [1]}} | tojson(indent=4) }}
{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }} {% endfor %}
{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m['role'] }}{% else %}none{% endfor %}
{% for k, v in messages[2].items() %}{{ k }}={{ v }};{% endfor %}{% for k, v in messages[2] | dictsort %}{{ k }};{% endfor %}{% for k in messages[2] | items %}{{ k[0] }}{% endfor %}
{{ messages[2].content.split('</think>')[-1].lstrip('\n') }}|{{ messages[0].content.strip() }}|{{ messages[0].content | trim }}|{{ messages[0].content.rstrip() }}
{{ 'abc'.startswith('a') }} {{ 'abc'.endswith('x') }} {{ 'a-b'.replace('-', '+') }} {{ 'ABC'.lower() }} {{ 'abc' | upper }} {{ 'a b'.title() }} {{ 'a b' | capitalize }} {{ 'abc'.find('c') }} {{ 'aba'.count('a') }} {{ ', '.join(['a', 'b']) }}
{{ messages[::-1] | map(attribute='role') | join(',') }} {{ messages[1:] | length }} {{ messages[-1].role }} {{ messages[:-1] | last is mapping }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ messages | rejectattr('role', 'eq', 'user') | map(attribute='content') | first }}
{{ messages[0].content is string }} {{ messages[3].content is string }} {{ messages[3].content is iterable }} {{ messages[3].content is sequence }} {{ messages[3] is mapping }} {{ 1 is number }} {{ x is defined }} {{ x is not defined }} {{ none is none }} {{ true is true }} {{ 1 is boolean }} {{ 2 is even }} {{ 2 is divisibleby 2 }} {{ 1 is integer }} {{ 1.5 is float }}
{{ messages[0].get('x') }} {{ messages[0].get('x', 'd') }} {{ messages[0].x | default('e') }} {{ '' | default('f', true) }} {{ messages[0].keys() | list }} {{ messages[0]['nope'] is defined }}
{{ 7 // 2 }} {{ 7 % 2 }} {{ 2 ** 5 }} {{ 7 / 2 }} {{ 1 + 1.0 }} {{ 'a' + 'b' }} {{ 'a' ~ 1 ~ true ~ none ~ 1.0 }} {{ 'ab' * 2 }} {{ [1] + [2] }} {{ 3 in [1, 3] }} {{ 'a' not in 'abc' }} {{ 'x' if false }}|{{ 'x' if false else 'y' }}
{% set ns = namespace(n=1, l=[], s='') %}{% for i in range(3) %}{% set ns.n = ns.n * 2 %}{% set ns.l = ns.l + [i] %}{% set ns.s = ns.s ~ i %}{% endfor %}{{ ns.n }}{{ ns.l }}{{ ns.s }}
{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% set a, b = 1, 2 %}{{ a + b }}{% set u = nothing %}{{ u is defined }}{% set c = 'p' if a == 1 else 'q' %}{{ c }}{% set d %}x{{ a }}{% endset %}{{ d | length }}{{ d }}
{% macro m(x, y=2) %}{{ x }}{{ y }}{% endmacro %}{{ m(1) }}{{ m(1, y='z') }}{% macro r(n) %}{{ n }}{% if n > 0 %}{{ r(n - 1) }}{% endif %}{% endmacro %}{{ r(3) }}
{% macro w() %}<{{ caller() }}>{% endmacro %}{% call w() %}in{% endcall %}{% filter upper %}up{% endfilter %}{% with q = 1 %}{{ q }}{% endwith %}{{ q }}
{# comment #}  {%- if messages[0].role == 'system' -%}  A  {%- endif %}  B {{- 'C' -}}  D
{% if a is undefined and not messages[9] is defined %}ok{% elif true %}no{% else %}never{% endif %}
{{ "tab\there" }} {{ 'q\'q' }} {{ '%.2f' | format(1.234) }} {{ '{} {}'.format(1, 'b') }}
{{ [3, 1, 2] | sort }} {{ [1, 1, 2] | unique | list }} {{ [1, 2, 3] | reverse | list }} {{ [1, 2] | sum }} {{ [4, 9] | max }} {{ [4, 9] | min }} {{ '12' | int + 1 }} {{ '1.5' | float }} {{ 5 | string + 'x' }} {{ -3 | abs }} {{ 2.567 | round(1) }} {{ '<a>' | safe }} {{ [[1, 2], [3]] | map('length') | list }} {{ ['a', 'b'] | map('upper') | join }}
{{ messages[3].content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('\n') }} {{ 'a\nb' | indent(2) }} {{ 'abc'[1] }}{{ 'abc'[-2:] }}{{ 'abc' | first }}{{ 'abc' | list }}
{% if not (messages[1].content is string) or (messages | length) >= 4 and 1 < 2 <= 2 %}T{% endif %}{{ 1 == 1.0 }}{{ 'a' < 'b' }}{{ [1] == [1] }}{{ {'a': 1} == {'a': 1} }}{{ none == false }}
{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 1) %}!{% endif %}{% if loop.previtem is defined %}{{ loop.previtem.role[0] }}{% endif %}{% if loop.nextitem is defined %}{{ loop.nextitem.role[0] }}{% endif %}{% endfor %}{{ eos_token }}
{% for group in messages | groupby('role') %}{{ group.grouper }}{{ group.list | length }}{% endfor %}{{ [1, 2, 3, 4] | batch(2) | list }}{{ range(5) | list }}{{ range(1, 6, 2) | list }}{{ dict(a=1) }}{{ 'x' | list | length }}
""".strip("\n").split("\n")


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
    ids, prompts, chats, features = {}, {}, [], []
    for source in FEATURES:
        source = source.replace("\\\\", "\\")
        conf = dict(bos_token="<s>", eos_token="</s>")
        features.append(dict(template=source, expected=render(source, conf, FEATURE_MESSAGES)))
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
    dump("features.json", dict(messages=FEATURE_MESSAGES, features=features))
    dump("stories260k/gguf.json", gguf_metadata(os.path.join(models, "stories260k", "model.gguf")))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(os.path.join(models, "stories260k", "hf", name), os.path.join(out, "stories260k", name))


if __name__ == "__main__":
    main(*sys.argv[1:])
