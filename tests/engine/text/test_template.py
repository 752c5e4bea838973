"""Chat templates: what they can use, what they cannot do, what they may not cost."""

import itertools
import time

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from baton.text import template
from baton.text.template import ChatTemplate, Rendering, joined_turns
from baton.types.errors import InvalidRequestError
from router.served_model import ServedModel

USER = [{"role": "user", "content": "hi <b>"}]


def test_the_default_models_template(default_artifact):
    template = ChatTemplate(default_artifact.chat_template)
    assert template.render(USER) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi <b><|im_end|>\n<|im_start|>assistant\n"
    )
    without = template.render(USER, rendering=Rendering(begin_answer=False))
    assert without.endswith("<|im_end|>\n")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hi <b>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% if true %}\n  {% if true %}\nx\n{% endif %}\n{% endif %}", "x\n"),
        ("{{ 2 * 3 }}{{ '-' * 3 }}", "6---"),
        ("{{ bos_token }}{{ eos_token is defined }}", "<s>False"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
    ],
)
def test_what_templates_rely_on(source, text):
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(USER) == text


@pytest.mark.parametrize(
    "source",
    [
        "{% generation %}{{ messages[0].content }}{% endgeneration %}!",
        "{% set x = 1 %}\n{% generation %}\n  {% set x = 2 %}{{ x }}\n{% endgeneration %}\n{{ x }}",
        "{% for m in messages %}{%- generation -%} {{ loop.last }} {% endgeneration %}{% endfor %}",
        "{{ value | tojson(separators=(',', ':')) }}",
        "{{ value | tojson(true) }}{{ value | tojson(ensure_ascii=True) }}",
        "{{ value | tojson(indent=1, sort_keys=true) }}{{ value | tojson(indent='--') }}",
        "{{ value | tojson(unknown=1) }}",
    ],
)
def test_tags_and_filters_are_those_of_transformers(source):
    values = {"value": {"é": ["<b>", 1], "a": None}}
    try:
        right = _compile_jinja_template(source).render(messages=USER, **values)
    except TypeError:
        with pytest.raises(InvalidRequestError, match="unexpected keyword"):
            ChatTemplate(source).render(USER, rendering=Rendering(values=values))
    else:
        assert ChatTemplate(source).render(USER, rendering=Rendering(values=values)) == right


def test_variables_and_powers_are_those_of_transformers():
    source = "{{ documents is defined and documents is none }}{{ tools is none }}{{ 2 ** 10 }}"
    right = render_jinja_template([USER], chat_template=source)[0][0]
    assert ChatTemplate(source).render(USER) == right


def test_requests_with_tools_have_a_template_of_their_own():
    template = ChatTemplate("plain", None, "{{ tools | length if tools else 'called' }}")
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[{}, {}]) == "2"
    called = [*USER, {"role": "assistant", "content": "", "tool_calls": [{}]}]
    assert template.render(called) == "called"


def test_the_date_can_be_asked_for():
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(USER) >= "2026"


def test_a_template_may_refuse():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        template.render(USER)
    assert caught.value.param == "messages"


def test_without_a_template_the_error_says_so():
    template = ChatTemplate(None)
    assert not template.exists
    with pytest.raises(InvalidRequestError, match="no chat template"):
        template.render(USER)


def test_a_broken_template_is_found_at_start():
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['x'] }}",
        "{{ range(10000000) | list }}",
        "{{ missing.attribute }}",
        "{{ messages[0]['content'] + 5 }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ 9 ** 999 }}",
        "{{ messages | tojson(indent=999999999) }}",
        "{{ messages | tojson(separators=(' ', '-' * 65)) }}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    ],
)
def test_what_a_template_must_not_do_is_an_error_of_the_request(source):
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source).render(USER)


def test_a_template_that_works_for_ever_is_stopped():
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = messages[0] %}"
    began_s = time.thread_time()
    with pytest.raises(InvalidRequestError, match="ran for more than"):
        ChatTemplate(source + "{% endfor %}{% endfor %}").render(USER)
    assert time.thread_time() - began_s < 4


ALTERNATES = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }};{% endfor %}"""


def test_turns_are_joined_where_a_template_requires_it(default_artifact):
    template = ChatTemplate(ALTERNATES)
    assert template.requires_alternation()
    assert not ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    ).requires_alternation()
    assert not ChatTemplate("{{ raise_exception('no') }}").requires_alternation()
    assert not ChatTemplate(None).requires_alternation()
    told = [{"role": role, "content": role[0]} for role in ("user", "user", "assistant", "user")]
    model = ServedModel(default_artifact, ("m",), chat_template=ALTERNATES)
    assert model.render_chat(told).replace("\n", "") == "uu;a;u;"
    called = {"role": "assistant", "content": "", "tool_calls": []}
    assert joined_turns([called, called, *told[:1]]) == [called, called, *told[:1]]


def test_time_in_which_a_busy_host_runs_other_threads_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late_s = itertools.count(0, 3)
    monkeypatch.setattr(template, "monotonic", lambda: float(next(late_s)))
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    turns = [{"role": "user", "content": word} for word in "abc"]
    assert ChatTemplate(source).render(turns) == "abc"
