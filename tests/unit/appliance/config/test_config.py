"""The configuration: closed, strict, layered, and pinned by a digest that covers exactly what it should."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.config.addresses import TcpAddress, is_loopback, parse_address
from appliance.config.settings import Config, ModelConfig, allowed_cids, load, load_file
from appliance.errors import BootError

SECTIONS: dict[str, Any] = {e.name: e.default_factory for e in fields(Config) if e.name != "models"}
SETTINGS = [(section, entry.name) for section, kind in SECTIONS.items() for entry in fields(kind)]
UNPINNED = {
    ("server", "listen"),
    ("server", "unsafe_plain_http_listen"),
    ("vsock", "allowed_cids"),
    ("attestation", "endorsement_relay"),
    ("attestation", "tpm2_tcti"),
    ("attestation", "tpm2_key_handle"),
    ("attestation", "tpm2_ak_certificate"),
    ("store", "models_dir"),
    ("keys", "file"),
    ("metrics", "listen"),
}


def hints(section: str) -> dict[str, Any]:
    return get_type_hints(SECTIONS[section])


def variable(section: str, key: str) -> str:
    return f"APPLIANCE_{section}_{key}".upper()


def kind_of(section: str, key: str) -> str:
    kind = hints(section)[key]
    kinds = {str: "text", int: "integer", float: "number", bool: "flag"}
    return kinds.get(kind, "list" if "tuple" in str(kind) else "auto")


JUNK_IN_FILE = {
    "text": ["1", "true", "1.5", '["a"]', "{}", "1979-05-27"],
    "integer": ['"ten"', "true", "1.0", "nan", "[1]", "-99999999", "99999999999999999999"],
    "number": ['"ten"', "true", "nan", "inf", "-inf", "[1.0]", "-1e9", "1e300"],
    "list": ['"one"', "[1]", "[true]", '[""]', "{}"],
    "flag": ["1", "0", '"true"', "[]"],
    "auto": ['"Auto"', '"ten"', "true", "1.5", "0", "-1"],
}
JUNK_IN_ENVIRONMENT = {
    "flag": ["", "1", "True", "yes"],
    "text": ["\udcff"],
    "integer": ["", "ten", "1.5", " 12", "1_0", "0x10", "true", "١٢", "nan", "-99999999", "9" * 5000],
    "number": ["", "ten", " 1.5", "1_0", "nan", "inf", "-inf", "infinity", "true", "1e300"],
    "list": ["\udcff"],
    "auto": ["", "ten", "Auto", "0", "1.5", " 4"],
}


@pytest.mark.parametrize(("section", "key"), SETTINGS)
def test_b180_junk_in_the_file_is_refused_by_name(section: str, key: str) -> None:
    for junk in JUNK_IN_FILE[kind_of(section, key)]:
        with pytest.raises(BootError, match=re.escape(f"{section}.{key}")):
            load(f"[{section}]\n{key} = {junk}\n", environ={})


@pytest.mark.parametrize(("section", "key"), SETTINGS)
def test_b180_junk_in_the_environment_is_refused_by_name(section: str, key: str) -> None:
    for junk in JUNK_IN_ENVIRONMENT[kind_of(section, key)]:
        with pytest.raises(BootError) as caught:
            load(None, environ={variable(section, key): junk})
        assert variable(section, key) in str(caught.value) or f"environment: {section}.{key}" in str(caught.value)


@pytest.mark.parametrize("name", ["APPLIANCE_", "APPLIANCE_RA_TLS", "APPLIANCE_MODELS_NAME", "APPLIANCE_server_issuer"])
def test_unknown_variables_are_refused(name: str) -> None:
    with pytest.raises(BootError, match=name):
        load(None, environ={name: "x"})


def test_other_variables_are_not_read() -> None:
    assert load(None, environ={"PATH": "\udcff", "MY_APPLIANCE_X": "1"}) == Config()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[sever]\n", "unknown section 'sever'"),
        ("[server]\nisuer = 'x'\n", "unknown setting server.isuer"),
        ("server = 1\n", "server must be a table"),
        ("[[server]]\n", "server must be a table"),
        ("models = 'x'\n", "models must be a list of tables"),
        ("models = ['x']\n", "models must be a list of tables"),
        ("[models]\nname = 'x'\n", "models must be a list of tables"),
        ("[[models]]\ncontext_length = 8\n", "models[0].name is missing"),
        ("[[models]]\nname = 'a'\n[[models]]\nname = 'a'\n", "a name appears twice"),
        ("[[models]]\nname = 'a'\ncontext = 1\n", "unknown setting models[0].context"),
        ("[[models]]\nname = 'a'\ncontext_length = true\n", "models[0].context_length"),
        ("[server]\nlisten = []\n", "server.listen is empty"),
        ("[server]\nissuer = ''\n", "server.issuer must lie between 1 and 1024 bytes"),
        (f"[server]\nissuer = '{'é' * 513}'\n", "server.issuer must lie between 1 and 1024 bytes"),
        ("[server\n", "not valid TOML"),
        ("[server]\nissuer = 'a'\nissuer = 'b'\n", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused(text: str, words: str) -> None:
    with pytest.raises(BootError, match=re.escape(words)):
        load(text, environ={})


def test_a_file_that_cannot_be_read_names_its_path(tmp_path: Path) -> None:
    (tmp_path / "latin1.toml").write_bytes(b"[server]\nissuer = '\xe9'\n")
    for name in ("absent.toml", "latin1.toml", "."):
        with pytest.raises(BootError, match=re.escape(str(tmp_path / name))):
            load_file(tmp_path / name, environ={})


def test_precedence_is_default_file_environment_command_line() -> None:
    text = "[server]\nissuer = 'file'\nmax_body_bytes = 2048\n[engine]\nthreads = 3\n"
    environ = {"APPLIANCE_SERVER_ISSUER": "environment", "APPLIANCE_ENGINE_THREADS": "auto"}
    overrides = {"server": {"listen": ["127.0.0.1:1"]}, "attestation": {"attester": "insecure"}}
    assert load(None, environ={}).server.issuer == "attested-inference"
    assert load(text, environ={}).server.issuer == "file"
    config = load(text, environ=environ, overrides=overrides)
    assert (config.server.issuer, config.server.max_body_bytes) == ("environment", 2048)
    assert (config.server.listen, config.attestation.attester) == (("127.0.0.1:1",), "insecure")
    assert config.engine.threads == "auto"
    environ["APPLIANCE_SERVER_LISTEN"] = "127.0.0.1:5, [::1]:6"
    assert load(text, environ=environ).server.listen == ("127.0.0.1:5", "[::1]:6")
    assert load(text, environ=environ, overrides=overrides).server.listen == ("127.0.0.1:1",)


def test_a_flag_of_the_environment() -> None:
    assert load("[receipts]\nair = false\n", environ={"APPLIANCE_RECEIPTS_AIR": "true"}).receipts.air is True
    assert load("[receipts]\nair = true\n", environ={"APPLIANCE_RECEIPTS_AIR": "false"}).receipts.air is False


def test_a_bad_layer_is_refused_even_where_a_later_one_would_win() -> None:
    with pytest.raises(BootError, match=r"configuration file: server\.issuer"):
        load("[server]\nissuer = 1\n", environ={"APPLIANCE_SERVER_ISSUER": "fine"})


def test_models_of_the_command_line_keep_the_settings_of_the_file() -> None:
    text = "[[models]]\nname = 'a'\ncontext_length = 99\n[[models]]\nname = 'b'\n"
    config = load(text, environ={}, models=("c", "a"))
    assert config.models == (ModelConfig(name="c"), ModelConfig(name="a", context_length=99))


# Values of every setting

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


def value_of(section: str, key: str) -> st.SearchStrategy[Any]:
    address = st.builds("127.0.0.1:{}".format, st.integers(0, 65535))
    if (section, key) == ("metrics", "listen"):
        return address
    if section == "server" and key.endswith("listen"):
        anywhere = st.one_of(address, st.builds("vsock:{}".format, st.integers(1, 2**32 - 2)), st.just("unix:/run/a"))
        return st.lists(anywhere, min_size=key == "listen", max_size=3).map(tuple)
    if (section, key) == ("attestation", "endorsement_relay"):
        port = st.integers(1, 65535)
        vsock = st.builds("vsock:{}:{}".format, st.integers(1, 2**32 - 2), st.integers(1, 2**32 - 2))
        return st.one_of(st.just(""), st.builds("192.0.2.1:{}".format, port), vsock, st.just("unix:/run/relay"))
    if (section, key) == ("vsock", "allowed_cids"):
        return st.lists(st.one_of(st.just("host"), st.integers(1, 2**32 - 2).map(str)), max_size=3).map(tuple)
    if (section, key) in (("server", "issuer"), ("attestation", "tpm2_tcti")):
        return TEXT.filter(bool)
    metadata = next(entry.metadata for entry in fields(SECTIONS[section]) if entry.name == key)
    low, high = metadata["low"], metadata["high"]
    if metadata["words"]:
        return st.sampled_from(metadata["words"])
    numbers = {
        "text": TEXT,
        "integer": st.integers(low, high) if low is not None else TEXT,
        "number": st.floats(low, high) if low is not None else TEXT,
        "list": st.lists(TEXT.filter(bool), max_size=3).map(tuple),
        "flag": st.booleans(),
        "auto": st.one_of(st.just("auto"), st.integers(2, 1024)),
    }
    return numbers[kind_of(section, key)]


def sections() -> st.SearchStrategy[Config]:
    built = {
        section: st.builds(kind, **{entry.name: value_of(section, entry.name) for entry in fields(kind)})
        for section, kind in SECTIONS.items()
    }
    model = st.builds(
        ModelConfig, name=TEXT.filter(bool), context_length=st.integers(0, 1 << 24), chat_template_file=TEXT
    )
    models = st.lists(model, max_size=3, unique_by=lambda m: m.name).map(tuple)
    return st.builds(Config, models=models, **built)


@given(sections())
def test_what_is_printed_is_read_back_to_the_same_tree(config: Config) -> None:
    again = load(config.to_toml(), environ={})
    assert again == config
    assert again.digest() == config.digest()


@given(st.data())
def test_every_pinned_setting_changes_the_digest_and_no_other_does(data: st.DataObject) -> None:
    config = data.draw(sections())
    section, key = data.draw(st.sampled_from(SETTINGS))
    old = getattr(getattr(config, section), key)
    new = data.draw(value_of(section, key).filter(lambda value: value != old))
    changed = replace(config, **{section: replace(getattr(config, section), **{key: new})})
    if (section, key) not in UNPINNED:
        assert changed.digest() != config.digest()
    elif section == "attestation" or bool(old) == bool(
        new
    ):  # whether there are keys, or a metrics listener, is pinned; where they are is not
        assert changed.digest() == config.digest()


def test_the_kind_of_each_listener_and_the_need_for_keys_are_pinned() -> None:
    plain = Config()
    texts = ["[metrics]\nlisten = '127.0.0.1:9'\n", "[keys]\nfile = '/k'\n", "[[models]]\nname = 'm'\n"]
    digests = {load(text, environ={}).digest() for text in texts} | {plain.digest()}
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("change", "pinned"),
    [({"name": "other"}, True), ({"context_length": 7}, True), ({"chat_template_file": "/t"}, False)],
)
def test_what_is_pinned_of_a_model(change: dict[str, Any], pinned: bool) -> None:
    model = ModelConfig(name="m")
    before = Config(models=(model,)).digest()
    assert (Config(models=(replace(model, **change),)).digest() != before) is pinned


def test_auto_stays_auto() -> None:
    engine = Config().pinned()["engine"]
    assert isinstance(engine, dict)
    assert (engine["threads"], engine["kv_tokens"]) == ("auto", "auto")


def test_integers_for_numbers_are_one_value_with_the_number() -> None:
    assert (
        load("[server]\ngrace_s = 3\n", environ={}).digest() == load("[server]\ngrace_s = 3.0\n", environ={}).digest()
    )


# Addresses


@pytest.mark.parametrize("entry", ["0.0.0.0:8443", "[::]:8443", "192.0.2.1:1", "example.com:1", "[fe80::1]:1"])
def test_b183_an_open_listener_needs_keys(entry: str) -> None:
    with pytest.raises(BootError, match="no API keys are configured"):
        load(f"[server]\nlisten = ['127.0.0.1:1', '{entry}']\n", environ={})
    assert load(f"[server]\nlisten = ['{entry}']\n[keys]\nfile = '/k'\n", environ={}).server.listen == (entry,)


def test_b183_the_default_is_loopback() -> None:
    addresses = [parse_address(entry) for entry in Config().server.listen]
    assert all(isinstance(address, TcpAddress) and address.loopback for address in addresses)


def test_only_loopback_counts_as_loopback() -> None:
    for host, expected in [("localhost", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("::", False)]:
        assert is_loopback(host) is expected
    assert not is_loopback("localhost.example.com")


@pytest.mark.parametrize("entry", ["vsock:5000", "vsock:3:5000", "unix:/run/appliance.sock", "systemd", "systemd:web"])
def test_what_no_network_reaches_needs_no_keys(entry: str) -> None:
    assert load(f"[server]\nlisten = ['{entry}']\n", environ={}).server.listen == (entry,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nlisten = ['vsock:abc']\n", "server.listen: address 'vsock:abc': 'abc' is no vsock port"),
        ("[server]\nlisten = ['vsock+unix:/run/v.sock:5000']\n", "inside the virtual machine this is vsock:5000"),
        ("[server]\nunsafe_plain_http_listen = ['0.0.0.0:80']\n[keys]\nfile = '/k'\n", "loopback, vsock and unix"),
        ("[server]\nunsafe_plain_http_listen = ['systemd']\n", "loopback, vsock and unix"),
        ("[metrics]\nlisten = 'vsock:9'\n", "metrics.listen 'vsock:9': expected HOST:PORT"),
        ("[vsock]\nallowed_cids = ['all']\n", "vsock.allowed_cids: 'all' is no vsock CID"),
        ("[vsock]\nallowed_cids = ['4294967295']\n", "vsock.allowed_cids: vsock CID 4294967295 is reserved"),
    ],
)
def test_b099_a_bad_address_is_refused_by_the_name_of_its_setting(text: str, words: str) -> None:
    with pytest.raises(BootError, match=re.escape(words)):
        load(text, environ={})


def test_plain_http_is_another_kind_of_listener_in_the_digest() -> None:
    both = load("[server]\nunsafe_plain_http_listen = ['vsock:80']\n", environ={})
    plain = load("[server]\nlisten = []\nunsafe_plain_http_listen = ['unix:/a']\n", environ={})
    elsewhere = load("[server]\nlisten = []\nunsafe_plain_http_listen = ['vsock:7']\n", environ={})
    assert both.pinned()["listeners"] == ["tls", "plain"]
    assert plain.pinned()["listeners"] == ["plain"]
    assert len({Config().digest(), both.digest(), plain.digest()}) == 3
    assert plain.digest() == elsewhere.digest()


def test_who_may_connect_over_vsock() -> None:
    assert allowed_cids(Config()) is None
    assert allowed_cids(load("[vsock]\nallowed_cids = ['host', '17', 'local']\n", environ={})) == {1, 2, 17}


@pytest.mark.parametrize(
    "relay", ["192.0.2.7:8003", "relay.example:1", "vsock:3:8003", "vsock:host:8003", "unix:/run/relay"]
)
def test_an_endorsement_relay_is_somewhere_to_connect_to(relay: str) -> None:
    named = load(f"[attestation]\nendorsement_relay = '{relay}'\n", environ={})
    assert named.attestation.endorsement_relay == relay
    assert named.digest() == Config().digest(), "a place, not behaviour"


@pytest.mark.parametrize(
    "relay", ["vsock:8003", "192.0.2.7:0", "vsock+unix:/run/v:1", "systemd", "https://a/", "relay"]
)
def test_what_is_nowhere_to_connect_to_is_no_endorsement_relay(relay: str) -> None:
    with pytest.raises(BootError, match=r"attestation\.endorsement_relay"):
        load(f"[attestation]\nendorsement_relay = '{relay}'\n", environ={})


def test_sections_and_kinds_are_complete() -> None:
    assert {kind_of(*setting) for setting in SETTINGS} == {"text", "integer", "number", "list", "flag", "auto"}
    for section, key in SETTINGS:
        metadata = next(entry.metadata for entry in fields(SECTIONS[section]) if entry.name == key)
        if kind_of(section, key) in {"integer", "number", "auto"}:
            assert None not in (metadata["low"], metadata["high"]), f"{section}.{key} has no bounds"
