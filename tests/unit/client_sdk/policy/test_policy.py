"""A policy that could not refuse anything, or pins what nothing can enforce, is an error when it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_sdk.errors import PolicyFileError
from client_sdk.policy.policy import Policy, UnsafeAcceptInsecure, policy_from_reference
from client_sdk.policy.reference_values import ReferenceValues
from client_sdk.tables import parse_digest

PIN = "ab" * 32
OTHER = "cd" * 32
MODELS = f'[models]\n"smollm2" = ["{PIN}"]\n'
GOOD = f"version = 1\nunsafe_accept_insecure = true\n{MODELS}"


def test_a_minimal_policy() -> None:
    policy = Policy.parse(GOOD)
    assert policy.models == {"smollm2": frozenset({bytes.fromhex(PIN)})}
    assert policy.insecure == UnsafeAcceptInsecure()
    assert (policy.max_channel_age_s, policy.max_continued_s, policy.max_clock_skew_s) == (3600, 600, 300)
    assert policy.configs is None
    assert policy.devices is None
    assert not policy.require_gap_free_chain


FULL = f"""
version = 1
unsafe_accept_insecure = true
configs = ["{PIN}", "{OTHER}"]
[models]
"a \\"quoted\\" näme" = ["{PIN}"]
"smollm2" = ["{PIN}", "SHA256:{OTHER.upper()}"]
[receipt]
required_claims = ["gpu", "execution.batching"]
devices = ["cpu", "cuda"]
require_gap_free_chain = true
[limits]
max_channel_age_s = 60
max_continued_s = 0
max_clock_skew_s = 10
"""


@pytest.mark.parametrize("text", [GOOD, FULL])
def test_a_policy_written_out_reads_back_the_same(text: str) -> None:
    policy = Policy.parse(text)
    again = Policy.parse(policy.to_toml())
    assert again == policy
    assert again.digest == policy.digest
    assert len(policy.digest) == 32


def test_the_digest_is_over_the_meaning() -> None:
    assert Policy.parse(GOOD).digest == Policy.parse("# comment\n" + GOOD.replace(PIN, PIN.upper())).digest
    changes = [
        "\n[limits]\nmax_continued_s = 0\n",
        '\n[receipt]\ndevices = ["cpu"]\n',
        '\n[receipt]\narithmetic = ["attested-1"]\n',
        f'\n"b" = ["{PIN}"]\n',
    ]
    assert len({Policy.parse(GOOD + change).digest for change in ["", *changes]}) == 5


BAD = {
    "empty-file": "",
    "not-toml": "version = ",
    "no-version": MODELS,
    "version-2": GOOD.replace("version = 1", "version = 2"),
    "version-true": GOOD.replace("version = 1", "version = true"),
    "B007-no-models": "version = 1\nunsafe_accept_insecure = true\n",
    "B007-models-empty": "version = 1\nunsafe_accept_insecure = true\n[models]\n",
    "B007-pins-empty": GOOD.replace(f'["{PIN}"]', "[]"),
    "B007-pins-table": GOOD.replace(f'["{PIN}"]', "{}"),
    "B007-pins-list-of-tables": GOOD.replace(f'["{PIN}"]', "[{}]"),
    "B007-configs-empty": GOOD.replace("[models]", "configs = []\n[models]"),
    "B031-prefix": GOOD.replace(PIN, PIN[:8]),
    "B031-63": GOOD.replace(PIN, PIN[:-1]),
    "B031-65": GOOD.replace(PIN, PIN + "a"),
    "B031-sha512-label": GOOD.replace(PIN, "sha512:" + PIN),
    "B031-not-hex": GOOD.replace(PIN, "zz" * 32),
    "B031-blank": GOOD.replace(PIN, " " * 64),
    "B031-inner-space": GOOD.replace(PIN, PIN[:32] + " " + PIN[33:]),
    "all-zero": GOOD.replace(PIN, "00" * 32),
    "bare-string": GOOD.replace(f'["{PIN}"]', f'"{PIN}"'),
    "pin-number": GOOD.replace(f'["{PIN}"]', "[1]"),
    "B044-any": GOOD.replace(f'["{PIN}"]', '"any"'),
    "B044-star": GOOD.replace(f'["{PIN}"]', '["*"]'),
    "B044-any-model": GOOD.replace('"smollm2"', '"any"'),
    "B044-star-model": GOOD.replace('"smollm2"', '"*"'),
    "arithmetic-any": GOOD + '[receipt]\narithmetic = ["any"]\n',
    "arithmetic-empty": GOOD + "[receipt]\narithmetic = []\n",
    "arithmetic-text": GOOD + '[receipt]\narithmetic = "attested-1"\n',
    "B044-devices-any": GOOD + '[receipt]\ndevices = ["any"]\n',
    "model-name-empty": GOOD.replace('"smollm2"', '""'),
    "model-name-blank": GOOD.replace('"smollm2"', '" smollm2"'),
    "model-name-control": GOOD.replace('"smollm2"', '"a\\u0007"'),
    "no-family": f"version = 1\n{MODELS}",
    "insecure-false-is-no-family": GOOD.replace("true", "false"),
    "insecure-text": GOOD.replace("true", '"true"'),
    "insecure-one": GOOD.replace("true", "1"),
    "B023-family-not-verifiable": GOOD + '[families.sev-es]\nmeasurements = ["' + "11" * 48 + '"]\n',
    "B023-key-that-no-family-has": GOOD + '[families.sev-snp]\nmeasurement = ["' + "11" * 48 + '"]\n',
    "B023-tpm2-without-pins": GOOD + "[families.tpm2]\n",
    "family-not-a-table": GOOD.replace("[models]", "families.tdx = 1\n[models]"),
    "devices-alone-vouch-for-no-machine": f"version = 1\n{MODELS}[families.nvidia]\n",
    "insecure-as-family": f"version = 1\n{MODELS}[families.insecure]\n",
    "families-not-a-table": GOOD.replace("[models]", "families = 1\n[models]"),
    "unknown-key": GOOD.replace("[models]", "debug = true\n[models]"),
    "unknown-receipt-key": GOOD + "[receipt]\nskip = true\n",
    "unknown-limit": GOOD + "[limits]\nmax_age = 1\n",
    "required-claim-unknown": GOOD + '[receipt]\nrequired_claims = ["signature"]\n',
    "required-claims-empty": GOOD + "[receipt]\nrequired_claims = []\n",
    "devices-empty": GOOD + "[receipt]\ndevices = []\n",
    "gap-free-text": GOOD + '[receipt]\nrequire_gap_free_chain = "no"\n',
    "limit-negative": GOOD + "[limits]\nmax_clock_skew_s = -1\n",
    "limit-float": GOOD + "[limits]\nmax_clock_skew_s = 1.5\n",
    "limit-true": GOOD + "[limits]\nmax_clock_skew_s = true\n",
    "limit-endless": GOOD + "[limits]\nmax_clock_skew_s = 86401\n",
    "channel-age-zero": GOOD + "[limits]\nmax_channel_age_s = 0\n",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_a_policy_that_refuses_too_little_is_an_error(text: str) -> None:
    Policy.parse(GOOD)
    with pytest.raises(PolicyFileError):
        Policy.parse(text)


PINS = frozenset({bytes.fromhex(PIN)})


@pytest.mark.parametrize(
    "fields",
    [
        {"models": {}},
        {"models": {"m": frozenset()}},
        {"models": {"m": PIN}},
        {"models": {"m": frozenset({PIN})}},
        {"models": {"m": frozenset({bytes(32)})}},
        {"models": {"m": frozenset({b"short"})}},
        {"models": {"m": PINS}, "insecure": None},
        {"models": {"m": PINS}, "insecure": True},
        {"models": {"m": PINS}, "families": frozenset({"tdx"})},
        {"models": {"m": PINS}, "configs": frozenset()},
        {"models": {"m": PINS}, "devices": frozenset()},
        {"models": {"m": PINS}, "require_gap_free_chain": 1},
        {"models": {"m": PINS}, "max_continued_s": -1},
    ],
)
def test_b007_the_same_holds_in_python(fields: dict[str, Any]) -> None:
    with pytest.raises(PolicyFileError):
        Policy(**{"insecure": UnsafeAcceptInsecure(), **fields})


def test_a_policy_cannot_be_changed_afterwards() -> None:
    pins: dict[str, frozenset[bytes]] = {"m": PINS}
    policy = Policy(models=pins, insecure=UnsafeAcceptInsecure())
    pins["m"] = frozenset()
    assert policy.models["m"] == PINS
    with pytest.raises(TypeError):
        policy.models["m"] = frozenset()  # type: ignore[index]


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(GOOD)
    assert Policy.load(path) == Policy.load(str(path)) == Policy.parse(GOOD)
    for content in (b"\xff", b"#" * ((1 << 20) + 1)):
        path.write_bytes(content)
        with pytest.raises(PolicyFileError, match=r"policy\.toml"):
            Policy.load(path)
    with pytest.raises(PolicyFileError, match=r"missing\.toml"):
        Policy.load(tmp_path / "missing.toml")


@pytest.mark.parametrize("text", [PIN, f"  {PIN}\n", PIN.upper(), f"sha256:{PIN}", f"SHA256:{PIN.upper()}"])
def test_b031_one_parser_normalises_digests(text: str) -> None:
    assert parse_digest(text, "pin") == bytes.fromhex(PIN)


REFERENCE = f"""version = 1
source = "built on Tuesday"
config = "{OTHER}"
engine = "{PIN}"
arithmetic = "attested-1"

[models]
"smollm2" = "{PIN}"
"""


def test_reference_values_become_a_policy_only_with_the_opt_in() -> None:
    reference = ReferenceValues.parse(REFERENCE)
    assert ReferenceValues.parse(reference.to_toml()) == reference
    policy = policy_from_reference(reference, unsafe_accept_insecure=True)
    assert policy.models == {"smollm2": PINS}
    assert policy.configs == frozenset({bytes.fromhex(OTHER)})
    assert policy.arithmetic == frozenset({"attested-1"})
    assert Policy.parse(policy.to_toml()) == policy
    with pytest.raises(PolicyFileError, match="family"):
        policy_from_reference(reference, unsafe_accept_insecure=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        REFERENCE.replace("version = 1", "version = 3"),
        REFERENCE.replace('source = "built on Tuesday"\n', ""),
        REFERENCE.replace('"built on Tuesday"', '" "'),
        REFERENCE.replace('"attested-1"', '""'),
        REFERENCE.replace('"attested-1"', '["attested-1"]'),
        REFERENCE.replace(f'"smollm2" = "{PIN}"', ""),
        REFERENCE.replace(f'"smollm2" = "{PIN}"', f'"smollm2" = ["{PIN}"]'),
        REFERENCE.replace(PIN, PIN[:10]),
        REFERENCE.replace(OTHER, "00" * 32),
        "extra = 1\n" + REFERENCE,
        REFERENCE.replace("[models]", "families = 1\n[models]"),
    ],
)
def test_reference_files_are_closed_and_strict(text: str) -> None:
    with pytest.raises(PolicyFileError):
        ReferenceValues.parse(text)


@given(st.text(max_size=200))
def test_any_text_is_a_policy_or_a_policy_error(text: str) -> None:
    for parse in (Policy.parse, ReferenceValues.parse):
        with pytest.raises(PolicyFileError):
            parse(text)


@given(st.dictionaries(st.text(min_size=1, max_size=20), st.just(PINS), min_size=1, max_size=3))
def test_any_model_name_that_is_accepted_survives_the_file(models: dict[str, frozenset[bytes]]) -> None:
    try:
        policy = Policy(models=models, insecure=UnsafeAcceptInsecure())
    except PolicyFileError:
        return
    assert Policy.parse(policy.to_toml()) == policy
