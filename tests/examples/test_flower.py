from __future__ import annotations

import ssl
import stat
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "flower"
sys.path.insert(0, str(EXAMPLE))

import credentials  # noqa: E402
from cryptography import x509  # noqa: E402
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key  # noqa: E402
from flwr.cli.supernode.register import try_load_public_key  # noqa: E402

from fedfuse.experiment.config import load_experiment  # noqa: E402


def test_the_experiment_is_sound() -> None:
    assert load_experiment(EXAMPLE / "federation.toml").data.clients == 3


def test_the_authority_signs_the_superlink_and_nothing_else(tmp_path: Path) -> None:
    credentials.main(tmp_path, ["north"])
    ca, server = (x509.load_pem_x509_certificate((tmp_path / f).read_bytes()) for f in ("ca.crt", "server.crt"))
    server.verify_directly_issued_by(ca)
    ca.verify_directly_issued_by(ca)
    assert not list(tmp_path.glob("ca.key"))  # thrown away
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")


def test_a_sites_keys_are_a_pair_that_flower_takes_and_only_its_owner_reads(tmp_path: Path) -> None:
    credentials.write_keys(tmp_path, "north")
    private = load_ssh_private_key((tmp_path / "north.key").read_bytes(), None)
    public = load_ssh_public_key((tmp_path / "north.pub").read_bytes())
    assert private.public_key() == public  # type: ignore[union-attr]
    assert try_load_public_key(tmp_path / "north.pub")
    assert stat.S_IMODE((tmp_path / "north.key").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):  # a key that is in use is not replaced by a slip
        credentials.write_keys(tmp_path, "north")
