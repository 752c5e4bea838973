"""`baton certs`: what it prints can be pasted, and what it makes can be used."""

from pathlib import Path

import yaml
from typer.testing import CliRunner

from baton.config.load import load_config
from baton.wire.tls import FleetTls
from fleet.cli.main import app
from router.frontend.http.certificate import LiveCertificate


def baton(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*map(str, words)])
    return done.exit_code, done.output + (done.stderr or "")


def test_the_lines_that_it_prints_make_a_fleet_file_that_works(tmp_path: Path) -> None:
    file, folder = tmp_path / "fleet.yaml", tmp_path / "certs"
    file.write_text("fleet: paris\n")
    code, said = baton("certs", folder, file, "--host", "10.0.0.1")
    assert code == 0, said
    lines = said[said.index("pools:") : said.index("Clients verify")]
    short = said.replace(str(folder), "/etc/baton/certs")
    assert [line for line in short.splitlines() if len(line) > 80] == []
    file.write_text(yaml.safe_dump({"fleet": "paris", "host": "0.0.0.0", **yaml.safe_load(lines)}))
    config = load_config(file)
    assert FleetTls(config.tls_files).name == "paris.baton.internal"
    assert LiveCertificate(config.clients.tls).context

    code, said = baton("certs", folder, file)
    assert code == 1 and "already has a CA" in said and "--renew" in said
    before = (folder / "fleet.pem").read_bytes(), (folder / "ca.pem").read_bytes()
    code, said = baton("certs", folder, "--renew")
    assert code == 0 and "new certificates" in said and "Keep ca.key" not in said
    short = said.replace(str(folder), "/etc/baton/certs")
    assert [line for line in short.splitlines() if len(line) > 80] == []
    assert (folder / "fleet.pem").read_bytes() != before[0]
    assert (folder / "ca.pem").read_bytes() == before[1]
    FleetTls(config.tls_files)
    code, said = baton("certs", tmp_path / "nothing", "--renew")
    assert code == 1 and "cannot read the CA" in said


def test_a_file_of_authorities_that_is_not_there_is_named(tmp_path: Path) -> None:
    code, said = baton("--cacert", tmp_path / "ca.pem", "status", "--url", "https://127.0.0.1:1")
    assert code == 1 and "no such file" in said
