#!/usr/bin/env python3
"""Chat templates of released models, as the package trl carries them, rendered by transformers and by Phalanx: the same bytes.
Run by `make test-all`.

    python scripts/chat_templates.py --bin build/release/bin

Every template meets every conversation of CONVERSATIONS, with and without the generation prompt. Where a template refuses
one (raise_exception, or a field that it needs), Phalanx must refuse it too. Where a template has {% generation %} marks, the
spans that they mark must be the same characters.

Then whole conversations are tokenised, with small tokenizers made here (byte-level, and of characters with ▁). Where a template
has marks, ids and mask must be those of transformers' apply_chat_template. Where a template without marks has a twin with them
that renders the same text, the answers that Phalanx finds must be the marked ones, but for white space behind them.

Then each conversation's last answer is the completion of the messages before it, as lists. What is trained must be what the
completion mask of TRL's SFTTrainer and DPOTrainer has: all tokens behind those of the prompt with the generation prompt, but
for white space behind the answer, and what a template's marks leave out.

What it needs comes through pip into --cache (about 90 MB) and stays there; nothing of it is part of this repository, and
none of it brings a torch. Exits with 77 where a package cannot be had, and says so.
"""

import argparse
import collections
import datetime
import json
import pathlib
import re
import subprocess
import sys
import time

import pypi_libraries

LIBRARIES = ["transformers==5.24.0", "jinja2==3.1.6"]
WITHOUT_TORCH = ["trl==1.16.0"]  # would bring a torch
NOW = datetime.datetime(2026, 1, 2, 15, 4, 5)

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather in a town, \"today\" or <later>.",
    "parameters": {"type": "object", "required": ["town"], "properties": {
        "town": {"type": "string", "description": "Name of the town, e.g. Zürich"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
        "days": {"type": ["integer", "null"], "description": "How many"},
        "hours": {"type": "array", "items": {"type": "number"}},
        "place": {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}, "required": ["lat"]}}}}}
TIME = {"type": "function", "function": {"name": "get_time", "description": "Now.", "parameters": {"type": "object", "properties": {}}}}


def call(name, arguments, number="call00001"):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def system(content):
    return {"role": "system", "content": content}


def tool(content, **more):
    return {"role": "tool", "content": content, "tool_call_id": "call00001", "name": "get_weather", **more}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


ASKS = [user("How warm is it in Zürich?"), assistant("", tool_calls=[call("get_weather", {"town": "Zürich", "days": 1, "hours": [1.5, 2e-7]})]),
        tool("{\"degrees\": 21.5}")]

# Name, messages, tools, further arguments of the template.
CONVERSATIONS = [
    ("one turn", [user("Hi")], None, {}),
    ("with answer", [user("Hi"), assistant("Hello!")], None, {}),
    ("system", [system("You are <brief> & \"kind\"."), user("Who are you?"), assistant("Me.")], None, {}),
    ("many turns", [system("Be brief."), user("1+1?"), assistant("2"), user("2+2?"), assistant(" 4 "), user("3+3?")], None, {}),
    ("unicode", [user("Grüße, 世界! 👩‍🔬 \u2028 é"), assistant("¡Olé! 🎉\n\nنعم")], None, {}),
    ("white space", [user("  \n leading\t"), assistant("\n\n trailing \n\n"), user("\n")], None, {}),
    ("empty contents", [system(""), user(""), assistant(""), user("So?")], None, {}),
    ("reasoning", [user("17*3?"), assistant("51", reasoning_content="17*3 = 51."), user("And +1?"), assistant("52", reasoning_content="One more.\n")], None, {}),
    ("reasoning in content", [user("17*3?"), assistant("<think>\nHm: 51.\n</think>\n\n51"), user("Sure?"), assistant("<think>Yes</think>Yes.")], None, {}),
    ("thinking off", [user("17*3?")], None, {"enable_thinking": False, "thinking": False}),
    ("thinking on", [system("Think."), user("17*3?")], None, {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    ("tools", [user("How warm is it?")], [WEATHER, TIME], {}),
    ("tools, system", [system("Use tools."), user("How warm is it?")], [WEATHER], {}),
    ("tool call", ASKS, [WEATHER, TIME], {}),
    ("tool answered", [*ASKS, assistant("It is 21.5 degrees."), user("Thanks"), assistant("Welcome")], [WEATHER], {}),
    ("two tools at once", [user("Weather and time?"),
                           assistant("I look.", tool_calls=[call("get_weather", {"town": "Bern"}), call("get_time", {}, "call00002")]),
                           tool("rain"), tool("noon", tool_call_id="call00002", name="get_time"), assistant("Rain at noon.")], [WEATHER, TIME], {}),
    ("call with reasoning", [user("Weather?"), assistant("", reasoning_content="I need a tool.", tool_calls=[call("get_weather", {"town": "Bern", "unit": None})]),
                             tool("rain"), assistant("Rain.", reasoning_content="It rains.")], [WEATHER], {}),
    ("arguments as text", [user("Weather?"), assistant(None, tool_calls=[call("get_weather", "{\"town\": \"Bern\"}")]), tool("rain")], [WEATHER], {}),
    ("deep arguments", [user("Go"), assistant("", tool_calls=[call("get_weather", {"place": {"lat": 47.0, "lon": -8.5e20, "tags": ["a'b", "c\"d", True, None]}})]),
                        tool("ok")], [WEATHER], {}),
    ("parts", [user(parts("One.", " Two.")), assistant(parts("Three."))], None, {}),
    ("parts, system", [system(parts("Be brief.")), user(parts("Hi")), assistant(parts("Ho")), user(parts("?"))], None, {}),
    ("image", [user([{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}]), assistant(parts("A cat."))], None, {}),
    ("developer", [{"role": "developer", "content": "Be formal."}, user("Hi"), assistant("Good day.")], None, {}),
    ("unknown role", [{"role": "critic", "content": "Hm."}], None, {}),
    ("two users", [user("One"), user("Two"), assistant("Three")], None, {}),
    ("assistant first", [assistant("Hello"), user("Hi")], None, {}),
    ("only system", [system("Alone.")], None, {}),
    ("no messages", [], None, {}),
    ("special tokens as text", [user("<|im_end|>\n<|im_start|>system\n{{ 7*7 }} {% raw %}"), assistant("</s>[INST]")], None, {}),
]


def set_clock(module):
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return NOW
    module.datetime = Clock


def has_generation_marks(source):
    return "{% generation" in source or "{%- generation" in source


def cases_of(templates):
    for path in templates:
        for name, messages, tools, more in CONVERSATIONS:
            for prompt in (False, True):
                yield path, f"{name}{', generation prompt' if prompt else ''}", messages, tools, {"bos_token": "<s>", "eos_token": "</s>", **more}, prompt


def by_transformers(module, source, messages, tools, more, prompt, has_marks):
    messages = module._normalize_chat_messages(messages)
    try:
        texts, spans = module.render_jinja_template([messages], tools=tools, chat_template=source, add_generation_prompt=prompt,
                                                    return_assistant_tokens_mask=has_marks, **more)
        return {"text": texts[0], "generated": spans[0] if has_marks else []}
    except Exception as error:  # what a template throws at its conversation
        return {"error": f"{type(error).__name__}: {error}"}


def context_of(module, messages, tools, more, prompt):
    messages = module._alias_reasoning_fields(module._normalize_chat_messages(messages))
    return {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt, **more}


def in_characters(text, spans):
    encoded = text.encode()
    return [[len(encoded[:begin].decode()), len(encoded[:end].decode())] for begin, end in spans]


def by_phalanx(program, cache, lines):
    cases, results = cache / "chat_cases.jsonl", cache / "chat_results.jsonl"
    cases.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    subprocess.run([program, cases, results], check=True)
    *found, last = [json.loads(line) for line in results.read_text().split("\n")[:-1]]
    return found, last["seconds"]


def differs(found, expected):
    if ("error" in found) != ("error" in expected):
        return True
    if "error" in found:
        return False
    return found["text"] != expected["text"] or sorted(in_characters(found["text"], found["generated"])) != sorted(map(list, expected["generated"]))


def make_tokenizers(cache, texts):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    special = sorted({token for text in texts for token in re.findall(r"<[|｜/]?[a-z_▁A-Z0-9]{1,30}[|｜]?>", text)} | {"<s>", "</s>", "<unk>"})
    paths = []
    for kind in ("bytes", "metaspace"):
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True) if kind == "metaspace" else models.BPE())
        alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else [f"<0x{byte:02X}>" for byte in range(256)]
        if kind == "bytes":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
        else:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        more = [] if kind == "bytes" else alphabet
        trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=special + more, initial_alphabet=alphabet if kind == "bytes" else [], show_progress=False)
        tokenizer.train_from_iterator(texts[:400], trainer)
        file = json.loads(tokenizer.to_str())
        if kind == "metaspace":  # the bytes are tokens, but not ones that are searched in a text
            file["added_tokens"] = [token for token in file["added_tokens"] if token["content"] in special]
        paths.append(cache / f"chat_{kind}.json")
        paths[-1].write_text(json.dumps(file, ensure_ascii=False))
    return paths


def joined(answers):
    """Marks that touch are one."""
    spans = []
    for begin, end in answers:
        if spans and spans[-1][1] == begin:
            spans[-1][1] = end
        elif begin < end:
            spans.append([begin, end])
    return spans


def same_answers(result, twin, supplied=None):
    """The same spans, but for white space behind them, and, where `supplied` is what a generation prompt has, but for a part of
    it before them."""
    text = result["text"].encode()
    ours, theirs = joined(result["answers"]), joined(twin["answers"])
    if len(ours) != len(theirs):
        return False
    for (begin, end), (marked, marked_end) in zip(ours, theirs):
        if text[begin:end].rstrip() != text[begin:marked_end].rstrip():
            return False
        if begin != marked and (supplied is None or begin < marked or text[marked:begin] not in supplied.encode()):
            return False
    return True


def prompt_of(module, source, messages, tools, more):
    first = [message for message in messages if message["role"] != "system"][:1]
    result = by_transformers(module, source, first, tools, {"bos_token": "<s>", "eos_token": "</s>", **more}, True, False)
    return result.get("text", "")


def check_masks(arguments, cache, module, templates, sources, texts):
    from transformers import PreTrainedTokenizerFast
    tokenizers = make_tokenizers(cache, texts)
    twins = {path: path.with_name(f"{path.stem}_training.jinja") for path in templates}
    cases, lines = [], []
    for path in templates:
        for name, messages, tools, more in CONVERSATIONS:
            if not messages or all(message["role"] != "assistant" for message in messages):
                continue
            record = {"messages": messages, "chat_template_kwargs": more} | ({"tools": tools} if tools else {})
            for tokenizer in tokenizers:
                cases.append((path, name, messages, tools, more, tokenizer))
                lines.append({"template": str(path), "record": record, "tokenizer": str(tokenizer)})
    found, _ = by_phalanx(arguments.bin.resolve() / "chat_templates", cache, lines)
    fast = {path: PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<s>", eos_token="</s>") for path in tokenizers}
    by_case = {(case[0], case[1], case[5]): result for case, result in zip(cases, found)}
    counts = collections.Counter()
    wrong = 0
    for (path, name, messages, tools, more, tokenizer), result in zip(cases, found):
        has_marks = has_generation_marks(sources[path])
        if has_marks:
            try:
                expected = fast[tokenizer].apply_chat_template(messages, tools=tools, chat_template=sources[path], tokenize=True, return_dict=True,
                                                               return_assistant_tokens_mask=True, **more)
            except Exception:
                counts["refused by both" if "error" in result else "WRONG"] += 1
                continue
            same = "error" not in result and result["ids"] == expected["input_ids"] and result["mask"] == expected["assistant_masks"]
            counts["masks of marks"] += same
            if not same:
                wrong += 1
                if wrong <= arguments.show:
                    ids = result.get("ids") == expected["input_ids"]
                    print(f"{path.name}, {name}, {tokenizer.stem}: MASK DIFFERS: {result.get('error', 'ids ' + ('same' if ids else 'differ'))}")
                    if ids:
                        print("   ", [(i, a, b) for i, (a, b) in enumerate(zip(result["mask"], expected["assistant_masks"])) if a != b][:8])
            continue
        twin = by_case.get((twins[path], name, tokenizer))
        if "error" in result:
            counts["not found, said so" if "is not known" in result["error"] else "refused by the template"] += 1
        elif twin is None or twin.get("text") != result["text"]:
            counts["without a twin of the same text"] += 1
        elif same_answers(result, twin):
            counts["found as marked by the twin"] += 1
        elif same_answers(result, twin, prompt_of(module, sources[path], messages, tools, more)):
            counts["found behind what the prompt supplies and the twin marks"] += 1
        else:
            counts["found otherwise than marked by the twin"] += 1
            if arguments.twins:
                text = result["text"].encode()
                print(f"{path.name}, {name}: found {[text[b:e].decode() for b, e in result['answers']]}\n    marked {[text[b:e].decode() for b, e in twin['answers']]}")
    print(f"{len(cases)} tokenised conversations: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    return wrong + counts["WRONG"]


def completion_mask(module, source, tokenizer, messages, tools, more):
    """Ids of the whole conversation, and TRL's mask of them, but for what the template's marks leave out; None where TRL warns
    that the prompt is not their beginning."""
    marks = None
    if has_generation_marks(source):
        try:
            marks = tokenizer.apply_chat_template(messages, tools=tools, chat_template=source, tokenize=True, return_dict=True,
                                                  return_assistant_tokens_mask=True, **more)["assistant_masks"]
        except Exception:
            return None
    more = {"bos_token": "<s>", "eos_token": "</s>", **more}
    prompt = by_transformers(module, source, messages[:-1], tools, more, True, False)
    whole = by_transformers(module, source, messages, tools, more, False, False)
    if "error" in prompt or "error" in whole:
        return None
    first, ids = (tokenizer(one["text"], add_special_tokens=False)["input_ids"] for one in (prompt, whole))
    if ids[:len(first)] != first:
        return None
    mask = [0] * len(first) + [1] * (len(ids) - len(first))
    return ids, mask if marks is None else [a & b for a, b in zip(mask, marks)]


def is_same_but_for_space_behind(tokenizer, ids, mask, expected):
    last = max((i for i, trained in enumerate(mask) if trained), default=-1)
    return last >= 0 and mask[:last + 1] == expected[:last + 1] and not tokenizer.decode(ids[last + 1:]).strip()


def check_completions(arguments, cache, module, templates, sources):
    from transformers import PreTrainedTokenizerFast
    paths = [cache / "chat_bytes.json", cache / "chat_metaspace.json"]
    cases, lines = [], []
    for path in templates:
        for name, messages, tools, more in CONVERSATIONS:
            last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
            if last == 0:
                continue
            record = {"prompt": messages[:last], "completion": messages[last:last + 1], "chat_template_kwargs": more}
            for tokenizer in paths:
                cases.append((path, name, messages[:last + 1], tools, more, tokenizer))
                lines.append({"template": str(path), "record": record | ({"tools": tools} if tools else {}), "tokenizer": str(tokenizer)})
    found, _ = by_phalanx(arguments.bin.resolve() / "chat_templates", cache, lines)
    fast = {path: PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<s>", eos_token="</s>") for path in paths}
    counts = collections.Counter()
    wrong = 0
    for (path, name, messages, tools, more, tokenizer), result in zip(cases, found):
        expected = completion_mask(module, sources[path], fast[tokenizer], messages, tools, more)
        if expected is None:
            counts["refused, or TRL warns"] += 1
            continue
        ids, mask = expected
        if "error" in result:
            wrong += 1
            print(f"{path.name}, {name}, {tokenizer.stem}: REFUSED: {result['error']}")
        elif result["ids"] == ids and result["mask"] == mask:
            counts["the same"] += 1
        elif result["ids"] == ids and is_same_but_for_space_behind(fast[tokenizer], ids, result["mask"], mask):
            counts["the same but for white space behind the answer"] += 1
        else:
            wrong += 1
            if wrong <= arguments.show:
                print(f"{path.name}, {name}, {tokenizer.stem}: COMPLETION MASK DIFFERS: ids {'same' if result['ids'] == ids else 'differ'}")
                print("   ", [(i, fast[tokenizer].decode([ids[i]]), a, b) for i, (a, b) in enumerate(zip(result["mask"], mask)) if a != b][:8])
    print(f"{len(cases)} prompts with completions: " + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) + f", {wrong} differ")
    return wrong + (counts["the same"] == 0)


def report(name, case, found, expected):
    print(f"{name}, {case}: DIFFERS")
    if "error" in found or "error" in expected:
        print(f"    Phalanx      {found.get('error', 'renders')}\n    transformers {expected.get('error', 'renders')}")
        return
    at = next((i for i, (a, b) in enumerate(zip(found["text"], expected["text"])) if a != b), min(len(found["text"]), len(expected["text"])))
    for whose, result in (("Phalanx", found), ("transformers", expected)):
        print(f"    {whose:12} at {at}: {result['text'][max(at - 40, 0):at + 60]!r} spans {result['generated']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("build/release/bin"))
    parser.add_argument("--cache", type=pathlib.Path, default=pathlib.Path("build/released"))
    parser.add_argument("--twins", action="store_true", help="print where answers are found otherwise than a twin marks them")
    parser.add_argument("--show", type=int, default=20, help="differences that are printed")
    arguments = parser.parse_args()
    cache = arguments.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    packages = cache / "chat_python"
    pypi_libraries.bring(packages, LIBRARIES, WITHOUT_TORCH)
    import transformers.utils.chat_template_utils as module
    set_clock(module)
    templates = sorted((packages / "trl" / "chat_templates").glob("*.jinja"))
    cases = list(cases_of(templates))
    sources = {path: path.read_text() for path in templates}
    begin = time.perf_counter()
    expected = [by_transformers(module, sources[path], messages, tools, more, prompt, has_generation_marks(sources[path]))
                for path, _, messages, tools, more, prompt in cases]
    theirs = time.perf_counter() - begin
    found, ours = by_phalanx(arguments.bin.resolve() / "chat_templates", cache,
                             [{"template": str(path), "context": context_of(module, messages, tools, more, prompt)} for path, _, messages, tools, more, prompt in cases])
    wrong = [i for i in range(len(cases)) if differs(found[i], expected[i])]
    for i in wrong[:arguments.show]:
        report(cases[i][0].name, cases[i][1], found[i], expected[i])
    refused = sum("error" in result for result in expected)
    marked = sum(bool(result.get("generated")) for result in expected)
    print(f"{len(templates)} templates, {len(cases)} renderings: {len(wrong)} differ in {len({cases[i][0] for i in wrong})} templates; "
          f"{refused} refused, {marked} with generation spans; {ours:.2f} s, transformers {theirs:.2f} s (with its first compilation)")
    if wrong:
        print("by template:", dict(collections.Counter(cases[i][0].name for i in wrong)))
    masks = check_masks(arguments, cache, module, templates, sources, [result["text"] for result in expected if "text" in result])
    completions = check_completions(arguments, cache, module, templates, sources)
    return 1 if wrong or masks or completions or len(found) != len(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
