"""Two workers on one host whose ranks are on others: ``python -m tests.hosts.ranks_apart JSON``.

It says "same tokens" when hand-offs both ways gave the answer of one worker of one rank, and then
waits for the decode worker's end.
"""

import asyncio
import sys

import msgspec

from tests.workers.harness import routed, workers
from tests.workers.test_tensor_parallel import PROMPT, SMOLLM2, both_ways


async def main(host: str, prefill_ranks: list[str], decode_ranks: list[str]) -> None:
    here = {"model": SMOLLM2, "host": host, "insecure": True}
    async with workers("decode-1", **here) as (one,), routed(one) as router:
        await router.submit("a", PROMPT, None)
        await router.ended("a", 60)
        alone = router.tokens["a"]
    ranks = {"prefill": tuple(prefill_ranks), "decode": tuple(decode_ranks)}
    fields = {f"{role}_rank_addresses": addresses for role, addresses in ranks.items()}
    fields |= {f"{role}_tensor_parallel": len(those) + 1 for role, those in ranks.items()}
    async with workers("prefill-0", "decode-0", rank_memory="own", **here, **fields) as ends:
        prefill, decode = ends
        await both_ways(prefill, decode)
        async with routed(decode) as router:
            await router.submit("a", PROMPT, prefill)
            await router.ended("a", 60)
            assert router.tokens["a"] == alone
        sys.stdout.write("same tokens\n")
        sys.stdout.flush()
        code = await asyncio.wait_for(decode.process.wait(), 40)
        sys.stdout.write(f"decode ended with {code}\n")


if __name__ == "__main__":
    asyncio.run(main(**msgspec.json.decode(sys.argv[1])))
