"""Certificates for the SuperLink and a key pair for every site: run `python credentials.py FOLDER SITE...`.

The certificate authority exists for this federation only and its key is thrown away: who holds `ca.crt` can check the
SuperLink, and nobody can sign another. A site's private key never leaves its own machine; its public half is what the
operator registers.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAYS = 30


def write_certificates(folder: Path, host: str = "127.0.0.1") -> None:
    """ca.crt, and server.crt with server.key for a SuperLink at this address."""
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    name = _named("fedfuse example authority")
    limits = x509.BasicConstraints(ca=True, path_length=0)
    ca = _begun(name, name, authority.public_key()).add_extension(limits, critical=True)
    ca = ca.add_extension(_usage(signs=True), critical=True)
    ca = ca.add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host)), x509.DNSName("localhost")])
    mine = _begun(_named(host), name, server.public_key()).add_extension(names, critical=False)
    mine = mine.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    mine = mine.add_extension(_usage(signs=False), critical=True)
    whose = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    mine = mine.add_extension(whose, critical=False)
    folder.mkdir(parents=True, exist_ok=True)
    for file, certificate in (("ca.crt", ca), ("server.crt", mine)):
        signed = certificate.sign(authority, hashes.SHA384())
        (folder / file).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    _write_private(folder / "server.key", server, serialization.PrivateFormat.TraditionalOpenSSL)


def write_keys(folder: Path, site: str) -> None:
    """SITE.key, which stays at the site, and SITE.pub, which the operator registers."""
    key = ec.generate_private_key(ec.SECP384R1())
    folder.mkdir(parents=True, exist_ok=True)
    _write_private(folder / f"{site}.key", key, serialization.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / f"{site}.pub").write_bytes(public + b"\n")


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, kind: serialization.PrivateFormat) -> None:
    """A file that only its owner may read, from its first byte on."""
    data = key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
    return builder.not_valid_after(now + datetime.timedelta(days=DAYS))


def _usage(signs: bool) -> x509.KeyUsage:
    """An authority signs certificates and nothing else; a server proves who it is and nothing else."""
    never = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, decipher_only=False, **never)


def main(folder: Path, sites: list[str]) -> None:
    write_certificates(folder)
    for site in sites:
        write_keys(folder, site)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
