"""Model families as test data: template, format, and texts that such models write.

The texts follow the families' documentation: Qwen's page on function calling, Meta's page on
Llama 3.1 prompts, the model cards of Mistral-7B-Instruct-v0.3 and DeepSeek-V3.1, OpenAI's article
on the harmony format, and the chat templates of Qwen3-Coder, GLM, Mistral and DeepSeek R1.
"""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from baton.text.calls import formats
from baton.text.calls.formats import CallFormat
from baton.text.tokenizer import TextTokenizer
from baton.text.tools import Tool

TEMPLATES = Path(__file__).parents[1] / "templates"

WEATHER = Tool(
    name="get_weather",
    description="Weather of a city",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city"],
    },
)
NOW = Tool(name="now", description=None, parameters=None)
TOOLS = (WEATHER, NOW)

ROME = ("get_weather", '{"city": "Rome", "days": 3}')
NO_ARGUMENTS = ("now", "{}")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One call, two calls, and other texts that are calls."""

    template: str
    format: CallFormat
    one: str  # get_weather of Rome for three days
    two: str = ""  # the same, then `now`
    others: tuple[tuple[str, list[tuple[str, str]]], ...] = ()

    @property
    def source(self) -> str:
        return (TEMPLATES / f"{self.template}.jinja").read_text(encoding="utf-8")


_ARGUMENTS = ROME[1]
_HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {_ARGUMENTS}}}\n</tool_call>'
_HERMES_TWO = f'{_HERMES}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
_CODER = """\
<tool_call>
<function=get_weather>
<parameter=city>
Rome
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""
_CODER_TWO = f"{_CODER}\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
_CODER_LINES = """\
<function=get_weather>
<parameter=city>
 "Rome"

(Lazio) < \\
</parameter>
<parameter=tags>
["a", "</b>"]
</parameter>
<parameter=unit>
celsius
</parameter>
</function>
</tool_call>"""
_GLM = """\
<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Rome</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
</tool_call>"""
_GLM_47 = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)
_LLAMA = f'{{"name": "get_weather", "parameters": {_ARGUMENTS}}}'
_LLAMA_OTHERS = (
    (f"<|python_tag|>{_LLAMA}", [ROME]),
    (f"\n{_LLAMA}; {_LLAMA}", [ROME, ROME]),
    (f'{{"type": "function", "name": "get_weather", "parameters": {_ARGUMENTS}}}', [ROME]),
)
_V31 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    f"{_ARGUMENTS}<｜tool▁call▁end｜>"
)
_R1 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    f"```json\n{_ARGUMENTS}\n```<｜tool▁call▁end｜>"
)

_BRACKETS = ("<|", "<｜", "[")

FAMILIES = (
    Family(
        template="NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        format=formats.HERMES,
        one=_HERMES,
        two=_HERMES_TWO,
    ),
    Family(
        template="Qwen-Qwen2.5-7B-Instruct", format=formats.HERMES, one=_HERMES, two=_HERMES_TWO
    ),
    Family(template="Qwen-Qwen3-0.6B", format=formats.HERMES, one=_HERMES, two=_HERMES_TWO),
    Family(
        template="Qwen3-Coder",
        format=formats.QWEN_CODER,
        one=_CODER,
        two=_CODER_TWO,
        others=(
            (
                _CODER_LINES,
                [
                    (
                        "get_weather",
                        '{"city": " \\"Rome\\"\\n\\n(Lazio) < \\\\", "tags": ["a", "</b>"], '
                        '"unit": "celsius"}',
                    )
                ],
            ),
        ),
    ),
    Family(template="Qwen3.5-4B", format=formats.QWEN_CODER, one=_CODER, two=_CODER_TWO),
    Family(
        template="meta-llama-Llama-3.1-8B-Instruct",
        format=formats.LLAMA,
        one=_LLAMA,
        others=_LLAMA_OTHERS,
    ),
    Family(
        template="meta-llama-Llama-3.2-3B-Instruct",
        format=formats.LLAMA,
        one=_LLAMA,
        others=_LLAMA_OTHERS,
    ),
    Family(
        template="mistralai-Mistral-Nemo-Instruct-2407",
        format=formats.MISTRAL_LIST,
        one=f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_ARGUMENTS}}}]',
        two=(
            f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_ARGUMENTS}, "id": "aB3dE6gH9"}}'
            ', {"name": "now", "arguments": {}}]'
        ),
        others=(
            (f'[TOOL_CALLS] [{{"name": "get_weather", "arguments":{_ARGUMENTS}}}]', [ROME]),
            (f'[TOOL_CALLS][{{"arguments": {_ARGUMENTS}, "name": "get_weather"}}]', [ROME]),
        ),
    ),
    Family(
        template="Mistral-Small-3.2-24B-Instruct-2506",
        format=formats.MISTRAL_WITH_IDS,
        one=f"[TOOL_CALLS]get_weather[CALL_ID]aB3dE6gH9[ARGS]{_ARGUMENTS}",
        two=(
            f"[TOOL_CALLS]get_weather[CALL_ID]aB3dE6gH9[ARGS]{_ARGUMENTS}"
            "[TOOL_CALLS]now[CALL_ID]aB3dE6gH8[ARGS]{}"
        ),
    ),
    Family(
        template="mistralai-Ministral-3-14B-Reasoning-2512",
        format=formats.MISTRAL,
        one=f"[TOOL_CALLS]get_weather[ARGS]{_ARGUMENTS}",
        two=f"[TOOL_CALLS]get_weather[ARGS]{_ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}",
    ),
    Family(
        template="deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        format=formats.DEEPSEEK,
        one=f"{_R1}<｜tool▁calls▁end｜>",
        two=(
            f"{_R1}\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    Family(
        template="deepseek-ai-DeepSeek-V3.1",
        format=formats.DEEPSEEK_V31,
        one=f"{_V31}<｜tool▁calls▁end｜>",
        two=(
            f"{_V31}<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>"
        ),
    ),
    Family(
        template="GLM-4.6",
        format=formats.GLM,
        one=_GLM,
        two=f"{_GLM}\n<tool_call>now\n</tool_call>",
    ),
    Family(
        template="GLM-4.7-Flash",
        format=formats.GLM,
        one=_GLM_47,
        two=f"{_GLM_47}<tool_call>now</tool_call>",
    ),
    Family(
        template="openai-gpt-oss-120b",
        format=formats.GPT_OSS,
        one=(
            "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
            f"{_ARGUMENTS}"
        ),
        others=(
            (
                " to=functions.get_weather<|channel|>commentary json<|message|>"
                f"{_ARGUMENTS}<|call|>",
                [ROME],
            ),
            (f"<|channel|>commentary to=functions.get_weather<|message|>{_ARGUMENTS}", [ROME]),
        ),
    ),
)


def with_tags(tokenizer: TextTokenizer, begins: tuple[str, ...] = _BRACKETS) -> TextTokenizer:
    """Return the tokenizer with special tokens for the families' tags that begin so."""
    backend = Tokenizer.from_str(tokenizer.backend.to_str())
    tags = [tag for family in FAMILIES for tag in family.format.tags]
    special = [tag for tag in dict.fromkeys(tags) if tag.startswith(begins)]
    backend.add_tokens([AddedToken(tag, special=True) for tag in special])
    return TextTokenizer(backend)
