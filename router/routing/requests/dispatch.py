"""Begins attempts: has the request placed, and sends it to its decode worker."""

import time
from dataclasses import asdict, dataclass

import msgspec
from batonpb.common_pb2 import PrefixSource, Retention
from batonpb.decode_pb2 import Image, PrefillTarget, Submission

from baton.types.errors import UnavailableError
from baton.wire.capability import sign
from baton.wire.codecs import adapter_to_wire, sampling_to_wire
from baton.wire.fleet_token import FleetToken
from baton.wire.submission import prefix_request_id
from baton.wire.tokens import pack_tokens
from router.process_core import ProcessCore
from router.request import GenerationRequest
from router.routing.placement.placer import Placer, Quote
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.observer import Observer
from router.routing.workers.link import WorkerLink
from router.routing.workers.table import WorkerTable


def prefill_target(
    link: WorkerLink, token: FleetToken, active: ActiveRequest, reader: bytes
) -> PrefillTarget:
    """Return the message that lets the decode worker ``reader`` pull from a prefill worker."""
    return PrefillTarget(
        worker_id=link.worker_id,
        incarnation=link.incarnation,
        address=link.address,
        capability=_sign_capability(token, active, active.id, link.incarnation, reader),
    )


def prefix_sources(
    active: ActiveRequest, workers: WorkerTable, token: FleetToken, reader: WorkerLink
) -> list[PrefixSource]:
    """Return the sources of leading blocks for the worker that computes the prompt, in order."""
    prefix = active.placement.prefix if active.placement is not None else ()
    sources: list[PrefixSource] = []
    for worker_id, blocks, _ in prefix:
        link = workers.link(worker_id)
        if link is not None and link is not reader:
            pull_id = prefix_request_id(active.id, len(sources))
            holder = link.incarnation
            capability = _sign_capability(token, active, pull_id, holder, reader.incarnation)
            source = PrefixSource(
                worker_id=worker_id,
                incarnation=holder,
                address=link.address,
                blocks=blocks,
                capability=capability,
            )
            sources.append(source)
    return sources


def _sign_capability(
    token: FleetToken, active: ActiveRequest, request_id: str, holder: bytes, reader: bytes
) -> bytes:
    left_s = max(active.request.deadline_ns - time.monotonic_ns(), 0) / 1e9
    return sign(token, request_id, holder, reader, time.time() + left_s)


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Turns requests into submissions."""

    core: ProcessCore
    workers: WorkerTable
    placer: Placer
    observer: Observer
    router_id: str

    def begin_attempt(
        self,
        active: ActiveRequest,
        avoid: bytes = b"",
        why: str = "",
        quote: Quote | None = None,
    ) -> None:
        """Place the request and send it; ``avoid`` is an incarnation that failed it, for ``why``.

        With a ``quote``, which is the placer's last, it is placed as quoted.

        Raises:
            UnavailableError: No ready worker can serve it.
        """
        placement = self.placer.place(active.record.to_place, avoid, quote)
        active.take_placement(placement)
        active.record.next_attempt(why)
        computes_id = placement.chosen.computes.worker_id
        event = f"placed on {computes_id} → {placement.decode_id}"
        if active.request.images:
            event += ", one worker that pulls no prefix: the prompt has images"
        active.record.note(event, placement.placed_ns)
        self.observer.placed(active)
        link = self.workers.link(placement.decode_id)
        if link is None:
            raise UnavailableError(f"the chosen worker {placement.decode_id} is gone")
        if active.request.images and not link.capabilities.images:
            raise UnavailableError(f"{placement.decode_id} has an older version, without images")
        prefill = self.workers.link(placement.prefill_id)
        submission = self._submission(active, link, prefill, placement.placed_ns)
        size = len(submission.prompt_tokens) + len(submission.sampling.grammar)
        size += sum(len(image.data) for image in submission.images)
        alone = size > self.core.settings.unary_prompt_bytes
        link.submit(submission, alone=alone)
        if prefill is not None:  # the decode worker sends it the request; check that it is alive
            prefill.ask()

    def _submission(
        self, active: ActiveRequest, link: WorkerLink, prefill: WorkerLink | None, now_ns: int
    ) -> Submission:
        request = active.request
        record = active.record
        token = self.core.fleet_token
        target: PrefillTarget | None = None
        if prefill is not None:
            target = prefill_target(prefill, token, active, link.incarnation)
        prefix = prefix_sources(active, self.workers, token, prefill or link)
        emitted = record.emitted
        sampling = request.sampling
        if emitted:  # the client has the scores of the prompt already
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Submission(
            request_id=active.id,
            attempt=record.attempt,
            ticket=record.ticket,
            priority=request.priority,
            prompt_tokens=pack_tokens(request.prompt),
            sampling=sampling_to_wire(sampling),
            emitted=emitted,
            tenant=request.tenant,
            hash_seed=self.placer.hash_seed(request, link.capabilities),
            deadline_remaining_ns=max(request.deadline_ns - now_ns, 1),
            prefill=target,
            traceparent=request.traceparent,
            tracestate=request.tracestate,
            baggage=request.baggage,
            router_id=self.router_id,
            lease_ms=self.core.settings.lease_ms,
            probe=request.probe and not request.shadow,
            adapter=adapter_to_wire(request.adapter),
            pooling=request.pooling,
            prefix=prefix[0] if prefix else None,
            prefix_then=prefix[1:],
            kv_share=self.core.policies.of(request.tenant).kv_share or 0.0,
            retention=self._retention(request),
            images=[Image(**asdict(image)) for image in request.images],
        )

    def _retention(self, request: GenerationRequest) -> Retention | None:
        keep_s = request.hints.keep_s
        share = self.core.settings.clients.pinned_share
        if keep_s is None or not share:
            return None
        own_share = self.core.policies.of(request.tenant).kv_share or 1.0
        return Retention(keep_s=keep_s, share=min(share, own_share))
