"""Licence, digest and signature of a model, before a worker loads it."""

import sys
from pathlib import Path

import pytest

from baton.config.fleet_file import DEFAULT_MODEL, FleetConfig
from baton.engine.settings import EngineSettings
from baton.model.artifact import ModelError, resolve_model
from baton.model.trust import check_trust
from baton.types.trust import TrustRules
from fleet.local.checks.preflight import describe_model
from fleet.pools.resources import ControllerSpec, worker_settings
from fleet.pools.slots import Launch
from fleet.worker import worker
from fleet.worker.settings import WorkerSettings


@pytest.fixture(scope="module")
def artifact():
    return resolve_model(DEFAULT_MODEL)


def test_a_model_that_meets_the_rules_passes(artifact) -> None:
    digest = artifact.weights_digest.hex()
    check_trust(artifact, TrustRules())
    check_trust(artifact, TrustRules(licences=("mit", "apache-2.0"), weights_digest=digest))
    check_trust(artifact, TrustRules(weights_digest=digest[:12].upper()))


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ({"licences": ("mit",)}, "has licence 'apache-2.0'; gates.licences allows mit"),
        ({"weights_digest": "0" * 12}, "gates.weights_digest is 000000000000"),
    ],
)
def test_a_rule_that_is_not_met_is_named(artifact, rules, problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        check_trust(artifact, TrustRules(**rules))


def test_a_signature_without_the_package_is_no_valid_one(artifact, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    rules = TrustRules(signature="a", verify_key="b")
    with pytest.raises(ModelError, match=r"pip install baton\[signing\]"):
        check_trust(artifact, rules)


def fleet_with(**gates: object) -> FleetConfig:
    models = {"m": {"model": DEFAULT_MODEL, "gates": gates}}
    return FleetConfig.model_validate({"fleet": "f", "models": models})


def test_up_refuses_a_model_with_a_forbidden_licence() -> None:
    with pytest.raises(ValueError, match=r"has licence 'apache-2.0'"):
        describe_model(fleet_with(licences=["mit"]).lanes[0])


def test_the_rules_reach_the_workers_of_the_model() -> None:
    config = FleetConfig.model_validate_json(fleet_with(licences=["mit"]).only("m").to_json())
    spec = ControllerSpec(config_json="", redis_url="", fleet_token="", host="", log_dir="")
    fields = worker_settings(config.lanes[0], Launch("m-worker-0", "decode", 0), spec)
    assert fields["trust"]["licences"] == ("mit",)


async def test_a_worker_is_refused_before_its_engine_starts_and_it_registers(monkeypatch) -> None:
    async def started(*_: object) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr(worker, "start_engine", started)
    settings = WorkerSettings(
        worker_id="m-worker-0",
        role="decode",
        epoch=0,
        fleet="f.m",
        served_model_name="m",
        engine=EngineSettings(model=DEFAULT_MODEL),
        redis_url="redis://127.0.0.1:1",
        fleet_token="secret",
        trust=TrustRules(licences=("mit",)),
    )
    with pytest.raises(ModelError, match=r"gates.licences allows mit"):
        await worker.Worker.start(settings)


@pytest.mark.parametrize(
    ("gates", "problem"),
    [
        ({"verify_key": "a.pem"}, "signature and verify_key are used together"),
        ({"weights_digest": "nonsense"}, "weights_digest"),
        ({"licenses": ["mit"]}, "licenses"),
    ],
)
def test_wrong_rules_are_refused(gates, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        fleet_with(**gates)


def test_a_signature_is_verified(tmp_path: Path, artifact) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from model_signing import signing

    key = ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "private.pem").write_bytes(private)
    (tmp_path / "public.pem").write_bytes(public)
    signer = signing.Config().use_elliptic_key_signer(private_key=tmp_path / "private.pem")
    signer.sign(artifact.path, tmp_path / "signature")
    rules = TrustRules(
        signature=str(tmp_path / "signature"), verify_key=str(tmp_path / "public.pem")
    )
    check_trust(artifact, rules)
    (tmp_path / "signature").write_text("{}")
    with pytest.raises(ModelError, match="the signature is not valid"):
        check_trust(artifact, rules)
