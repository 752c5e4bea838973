"""Images of chats: which parts are images, and where their tokens stand in a prompt."""

import pytest

from baton.text.template import IMAGE_MARK, ChatTemplate
from baton.types.errors import InvalidRequestError
from baton.types.images import hashed_tokens, with_placeholders
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.parse import checked
from router.frontend.api.images import place_images
from router.frontend.api.messages.body import MessagesBody
from router.frontend.api.messages.translate import chat_of
from router.frontend.api.tool_use.offered import messages_of

IN_PARTS = """{% for m in messages %}[{{ m.role }}{% for p in m.content %}\
{{ '<i>' if p.type == 'image' else p.text }}{% endfor %}]{% endfor %}"""
BOTH = """{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% else %}\
{% for p in m.content %}{{ '<i>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}]\
{% endfor %}"""
TEXT_ONLY = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def image(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def body_of(*contents: object) -> ChatBody:
    messages = [{"role": "user", "content": content} for content in contents]
    return checked(ChatBody, {"model": "m", "messages": messages})


def test_templates_place_images_between_texts_without_line_breaks() -> None:
    body = body_of(["a", "b", image("1"), "c", image("2"), image("3")], "text")
    (told, other) = messages_of(body.messages, takes_images=True)
    mark = IMAGE_MARK
    assert (told["content"], other["content"]) == (f"a\nb{mark}c{mark}{mark}", "text")
    for source, begin in ((IN_PARTS, "[user"), (BOTH, "[")):
        template = ChatTemplate(source)
        assert template.takes_images
        shown = template.render([told, other], images=True)
        assert shown == f"{begin}a\nb<i>c<i><i>]{begin}text]"
    assert not ChatTemplate(TEXT_ONLY).takes_images


def test_a_mark_in_a_text_is_a_text_where_no_image_is() -> None:
    turn = {"role": "user", "content": f"a{IMAGE_MARK}b"}
    assert ChatTemplate(IN_PARTS).render([turn]) == f"[usera{IMAGE_MARK}b]"


def test_tokens_stand_in_place_of_placeholders() -> None:
    images = {"1": (b"one", ((7, 7, 7), (90,), 4)), "2": (b"two", ((8, 8), (90,), 4))}
    body = body_of([image("1"), "a", image("2")], [image("1")])
    prompt = [1, 90, 2, 90, 3, 90, 4]
    tokens, placed = place_images(prompt, body, images, "a\0")
    assert tokens == [1, 7, 7, 7, 2, 8, 8, 3, 7, 7, 7, 4]
    assert [(one.begin, one.count) for one in placed] == [(1, 3), (5, 2), (8, 3)]
    assert with_placeholders(tokens, placed) == prompt
    assert placed[0].digest == placed[2].digest != placed[1].digest
    hashed = list(hashed_tokens(tokens, placed))
    assert hashed[1:4] == hashed[8:11]
    assert len(set(hashed[1:4])) == 3
    assert min(hashed[1:4]) >= 2**31
    _, elsewhere = place_images(prompt, body, images, "b\0")
    assert elsewhere[0].digest != placed[0].digest  # other tenants cannot ask for it by name
    assert "one" not in repr(placed)


@pytest.mark.parametrize("prompt", [[1, 90], [1, 90, 2, 90, 90], []])
def test_another_number_of_placeholders_is_refused(prompt: list[int]) -> None:
    images = {"1": (b"one", ((7, 7, 7), (90,), 4))}
    with pytest.raises(InvalidRequestError):
        place_images(prompt, body_of([image("1"), "a", image("1")]), images, "")


def test_errors_name_the_part_of_the_original_body() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    block = {"type": "image", "source": source}
    text = {"type": "text", "text": "a"}
    fields = {
        "model": "m",
        "max_tokens": 1,
        "messages": [
            {"role": "user", "content": [text, text, block]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "n"}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": [text, block]}],
            },
        ],
    }
    translation = chat_of(checked(MessagesBody, fields))
    for param, place in (
        ("messages[0].content[2]", "messages[0].content[2]"),
        ("messages[2].content[1]", "messages[2].content[0].content[1]"),
        ("messages[0].content[1]", "messages[0].content[0]"),  # a text: its message
    ):
        with pytest.raises(InvalidRequestError) as error, translation.named():
            raise InvalidRequestError.at(param, "is odd")
        assert error.value.param == place
