"""Certificates for servers and clients of a test's own."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_DAY = timedelta(days=1)


class Issued(NamedTuple):
    """The files of a certificate and of its key."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates; writes its own, and those that it signs, into a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        signed = self._signed(name, self._key, datetime.now(UTC) + _DAY, is_authority=True)
        self.file = folder / f"{name}.pem"
        """Its own certificate."""
        self.file.write_bytes(signed.public_bytes(Encoding.PEM))

    def issue(self, name: str, *addresses: str, is_expired: bool = False) -> Issued:
        """A certificate for these IP addresses, or for a client without any."""
        key = ec.generate_private_key(ec.SECP256R1())
        until = datetime.now(UTC) + (-_DAY if is_expired else _DAY)
        signed = self._signed(name, key, until, addresses)
        issued = Issued(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        issued.certificate.write_bytes(signed.public_bytes(Encoding.PEM))
        issued.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        issued.key.chmod(0o600)
        return issued

    def _signed(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        until: datetime,
        addresses: tuple[str, ...] = (),
        *,
        is_authority: bool = False,
    ) -> x509.Certificate:
        public = key.public_key()
        unused = (
            *("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
            *("encipher_only", "decipher_only"),
        )
        builder = (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(_named(self._name))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(until - 3 * _DAY)
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=True,
                    key_cert_sign=is_authority,
                    crl_sign=is_authority,
                    **dict.fromkeys(unused, False),
                ),
                critical=True,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if addresses:
            names = [x509.IPAddress(ipaddress.ip_address(each)) for each in addresses]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
