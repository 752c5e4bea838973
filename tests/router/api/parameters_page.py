"""Writes ``docs/parameters.md``: ``python -m tests.router.api.parameters_page``."""

from pathlib import Path

from router.frontend.api.bodies.fields import Fields
from router.frontend.api.bodies.parameters import TABLE
from router.frontend.api.messages.parameters import TABLE as MESSAGES_TABLE
from router.frontend.api.pooling.parameters import TABLE as POOLING_TABLE
from router.frontend.api.responses.parameters import TABLE as RESPONSES_TABLE
from router.frontend.batch.parameters import TABLE as BATCH_TABLE

PAGE = Path(__file__).parents[3] / "docs" / "parameters.md"

HEAD = """\
# What becomes of each parameter

Written by `python -m tests.router.api.parameters_page` from the table that the router acts by
(`router/frontend/api/bodies/parameters.py`, and files of the same name for the newer APIs); a test
compares them.

- **honoured**: it acts. A value outside its limits is a 400 that names it.
- **accepted**: taken and left aside, because here it changes nothing.
- **refused**: ignoring it would change the answer. A 400 says what to do instead; values that
  ask for nothing are taken.
- **any other field** is left aside. The header `x-baton-ignored: a, messages[].b` of the answer
  names it, whether that is whole, streamed or an error, and `baton_ignored_fields{where}` counts
  it. With `clients: {strict: true}` in the fleet's file it is a 400 instead.

Values are read as vLLM reads them: `"0.5"` is 0.5, `5.0` is 5 where a whole number is wanted,
`null` is the default. A `model` that is left out is the one that the fleet serves.

`X-Request-Id` (up to 128 of `A-Za-z0-9._:/+=@~-`) comes back in the answer, stands in the log as
`client_request_id` and in traces as `baton.client_request_id`, and `GET /fleet/requests/{id}` finds
the request by it. Any other value is left aside, and the answer carries our own id.
"""


def page() -> str:
    """The whole page."""
    tables = TABLE + RESPONSES_TABLE + MESSAGES_TABLE + POOLING_TABLE + BATCH_TABLE
    return "\n".join([HEAD, *map(_section, tables)])


def _section(fields: Fields) -> str:
    rows = [("field", "", "")]
    rows += [(f"`{name}`", "honoured", note) for name, note in fields.honoured.items()]
    rows += [(f"`{name}`", "accepted", note) for name, note in fields.accepted.items()]
    rows += [(f"`{name}`", "refused", rule.instead) for name, rule in fields.refused.items()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---|---|---|")
    title = fields.title[0].upper() + fields.title[1:]
    return "\n".join([f"## {title}", "", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
