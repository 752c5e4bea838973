"""Text of the receipt of `baton tenants delete`."""

from collections.abc import Mapping
from typing import Any


def receipt_text(receipt: Mapping[str, Any]) -> str:
    """Return the receipt as lines of text."""
    deleted = receipt["deleted"]
    blocks = ", ".join(f"{count:,} {tier}" for tier, count in deleted["kv_blocks"].items())
    lines = [
        f"{receipt['tenant']}: deleted at {receipt['time']}, deletion {receipt['deletion']}",
        f"  limits             {'removed' if receipt['limits'] else 'there were none'}",
        f"  stored responses   {deleted['responses']:,}",
        f"  files              {deleted['files']:,}",
        f"  batches            {deleted['batches']:,}",
        f"  texts in logs      {deleted['log_lines']:,} lines",
        f"  KV blocks          {blocks}",
        f"  confirmed by       {', '.join(receipt['confirmed_by'])}",
    ]
    if receipt["shared_cache"]:
        lines.append("  The KV of all tenants was erased: share_cache_between_tenants is true.")
    if receipt["valid_keys"]:
        lines.append(f"  {receipt['valid_keys']} API keys of the tenant stay valid (`baton keys`).")
    counts = [*deleted["kv_blocks"].values(), *(n for n in deleted.values() if isinstance(n, int))]
    if not (receipt["limits"] or receipt["valid_keys"] or any(counts)):
        lines.append("  Nothing of this tenant was found: check the name (`baton keys ls`).")
    lines += [f"  not deleted        {what}" for what in receipt["not_deleted"]]
    return "\n".join(lines)
