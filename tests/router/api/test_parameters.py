"""The fields of all bodies are described, and the docs say what the bodies say."""

import pytest

from router.frontend.api.bodies.common import Body
from tests.router.api.parameters_page import KINDS, PAGE, page


def test_no_two_bodies_have_the_same_name():
    """Their schemas stand in one list in ``/openapi.json``."""

    def below(kind: type[Body]) -> list[type[Body]]:
        return [*kind.__subclasses__(), *(b for k in kind.__subclasses__() for b in below(k))]

    names = [kind.__name__ for kind in set(below(Body))]
    assert len(names) > 30
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_has_one_row(kind: type[Body]):
    """A field of a class acts and says how, or it is read and said to change nothing."""
    for name, field in kind.model_fields.items():
        alias = field.alias or name
        assert (field.description is None) == (alias in kind.accepted), alias
        assert alias not in kind.refused
    assert not kind.accepted.keys() & kind.refused.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_says_what_to_do_and_lets_defaults_through(kind: type[Body]):
    for name, rule in kind.refused.items():
        assert rule.instead, name
        assert not rule.allows(object())


def test_the_page_says_what_the_bodies_say():
    assert PAGE.read_text(encoding="utf-8") == page()
