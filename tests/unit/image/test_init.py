"""Init: the closed lists (command line, operator settings), checks of the machine, DHCP, supervision."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.attestation.families import tsm
from appliance.config import settings as configuration
from appliance.config.addresses import TcpAddress, VsockAddress, parse_address
from appliance.keys import SCOPES, KeyRing
from image.init import cmdline, dhcp, disks, machine, service, settings
from image.init.cmdline import Options
from image.init.errors import Stop
from image.measure import coverage

DISKS = Options(attester="tpm2", root_hash="ab" * 32, root_blocks=9000, model_hash="cd" * 32, model_blocks=24016)
KEY = {
    "id": '"key_0123456789ab"',
    "sha256": f'"{"0f" * 32}"',
    "label": '"front end"',
    "scopes": '["inference"]',
    "created": "1764374400",
}


def disk(head: str = "port = 9443", key: dict[str, str] = KEY) -> bytes:
    entry = "\n".join(f"{name} = {value}" for name, value in key.items())
    return settings.FIRST_LINE + f"{head}\n[[api_keys]]\n{entry}\n".encode()


def test_the_command_line_is_read_as_it_is_written() -> None:
    assert cmdline.parse(cmdline.render(DISKS)) == DISKS
    assert cmdline.parse(cmdline.render(DISKS) + "\n") == DISKS
    enclave = Options(attester="nitro", root_hash=None, root_blocks=None, model_hash=None, model_blocks=None)
    assert cmdline.parse(cmdline.render(enclave)) == enclave


def test_the_calculator_finds_both_hashes_in_it() -> None:
    roots = coverage.roots_of(cmdline.render(DISKS))
    assert roots.model is not None
    assert (roots.root.hex(), roots.model.hex()) == (DISKS.root_hash, DISKS.model_hash)


@pytest.mark.parametrize(
    "extra",
    [
        "init=/bin/sh",
        "systemd.debug_shell=1",
        "rd.break",
        "appliance.attester=insecure",
        "quiet",
        "console=ttyS1",
        "appliance.root_hash=" + "0" * 64,
        "lockdown=confidentiality",
        "appliance.shell=1",
        "loglevel=8",
        "\x1b[2J",
    ],
)
def test_b179_no_option_but_the_known_ones_gets_past_init(extra: str) -> None:
    """B179: what the host adds to the command line stops the boot."""
    with pytest.raises(Stop) as stopped:
        cmdline.parse(f"{cmdline.render(DISKS)} {extra}")
    assert str(stopped.value).isprintable()


@pytest.mark.parametrize("word", cmdline.FIXED)
def test_b179_no_hardening_option_can_be_left_out(word: str) -> None:
    with pytest.raises(Stop, match="lacks"):
        cmdline.parse(cmdline.render(DISKS).replace(word, "", 1))


@pytest.mark.parametrize("name", ["root_hash", "root_blocks", "model_hash", "model_blocks"])
def test_disks_are_named_whole_or_not_at_all(name: str) -> None:
    with pytest.raises(Stop, match="only some"):
        cmdline.parse(cmdline.render(dataclasses.replace(DISKS, **{name: None})))


def test_insecure_is_no_attester_of_an_image() -> None:
    assert "insecure" not in cmdline.ATTESTERS
    with pytest.raises(Stop, match="must be one of"):
        cmdline.parse(cmdline.render(dataclasses.replace(DISKS, attester="insecure")))


@given(st.text())
def test_any_other_command_line_is_refused_in_plain_characters(text: str) -> None:
    with pytest.raises(Stop) as stopped:
        cmdline.parse(text)
    assert str(stopped.value).isprintable()


def test_settings_become_the_appliance_s_key_file(tmp_path: Path) -> None:
    found = settings.parse(disk() + bytes(300))
    assert (found.port, found.vsock_port) == (9443, None)
    assert settings.listen_addresses(found) == ("0.0.0.0:9443",)
    both = settings.parse(disk("vsock_port = 77"))
    assert settings.listen_addresses(both) == ("0.0.0.0:8443", "vsock:77")
    path = tmp_path / "keys.json"
    path.write_bytes(settings.key_file(found))
    path.chmod(0o600)
    (entry,) = KeyRing.load(path).entries
    assert (entry.key_id, entry.sha256.hex(), entry.expires) == ("key_0123456789ab", "0f" * 32, None)
    assert settings.SCOPES == SCOPES


@pytest.mark.parametrize(
    "head",
    [
        'attester = "insecure"',
        "[server]",
        "port = 80",
        "port = 65536",
        'port = "8443"',
        "port = true",
        "vsock_port = 0",
        "models = []",
        'config = "x"',
        "[engine]\nthreads = 1",
    ],
)
def test_b179_no_other_setting_and_no_other_value_is_taken(head: str) -> None:
    """B179: everything that changes an answer is measured; the operator's disk cannot reach it."""
    with pytest.raises(Stop, match="operator setting"):
        settings.parse(disk(head))


@pytest.mark.parametrize("relay", ["192.0.2.1:8003", "10.0.2.2:1", "vsock:2:8003", "vsock:4294967294:4294967294"])
def test_the_endorsement_relay_becomes_a_setting_of_the_service_that_nothing_pins(relay: str) -> None:
    found = settings.parse(disk(f'endorsement_relay = "{relay}"'))
    environ = service.environment("/run/appliance", settings.environment(found))
    config = configuration.load(None, environ=environ)
    assert config.attestation.endorsement_relay == relay
    assert config.digest() == configuration.load(None, environ={}).digest()
    assert isinstance(parse_address(relay), TcpAddress | VsockAddress)


def test_without_a_relay_the_service_is_told_of_none() -> None:
    for head in ("", 'endorsement_relay = ""'):
        assert settings.environment(settings.parse(disk(head))) == {}
    assert service.environment("/h", {}) == {
        "PATH": "/usr/bin",
        "HOME": "/h",
        "LC_ALL": "C.UTF-8",
        "COLUMNS": "200",
        "NO_COLOR": "1",
    }


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives groups up")
def test_the_service_starts_with_that_environment_and_no_other() -> None:
    code = "import os, sys; print(sorted(os.environ), file=sys.stderr)"
    process = service.start(
        [sys.executable, "-c", code], uid=os.getuid(), home="/h", before=lambda: None, extra={"APPLIANCE_X": "1"}
    )
    assert process.stderr is not None
    with process.stderr as told:
        named = told.read().decode()
    process.wait()
    assert named.strip() == str(["APPLIANCE_X", "COLUMNS", "HOME", "LC_ALL", "NO_COLOR", "PATH"])


@pytest.mark.parametrize(
    "relay",
    [
        '"relay.example:8003"',
        '"192.0.2.1"',
        '"192.0.2.1:0"',
        '"192.0.2.1:65536"',
        '"192.0.2.1:08003"',
        '"192.0.2.01:1"',
        '"[::1]:1"',
        '"vsock:8003"',
        '"vsock:0:8003"',
        '"vsock:4294967295:1"',
        '"vsock:2:0"',
        '"vsock:host:1"',
        '"unix:/run/x"',
        '"192.0.2.1:1,2"',
        '"192.0.2.1:1\\n"',
        '"vsock:٢:1"',
        "8003",
        "true",
        '["vsock:2:8003"]',
    ],
)
def test_b179_a_relay_of_another_form_stops_the_boot(relay: str) -> None:
    with pytest.raises(Stop, match="operator settings: endorsement_relay"):
        settings.parse(disk(f"endorsement_relay = {relay}"))


@pytest.mark.parametrize(
    "change",
    [
        {"id": '"key_0"'},
        {"sha256": '"ai-secret"'},
        {"scopes": "[]"},
        {"scopes": '["admin"]'},
        {"created": '"now"'},
        {"created": "-1"},
        {"expires": "true"},
        {"label": '"a\\nb"'},
        {"key": '"ai-secret"'},
    ],
)
def test_an_api_key_of_another_form_stops_the_boot_without_telling_it(change: dict[str, str]) -> None:
    with pytest.raises(Stop) as stopped:
        settings.parse(disk(key={**KEY, **change}))
    assert "secret" not in str(stopped.value)


def test_without_a_key_nobody_could_call_so_nothing_starts() -> None:
    with pytest.raises(Stop, match="api_keys"):
        settings.parse(settings.FIRST_LINE + b"port = 9443\n")
    two = disk() + disk().removeprefix(settings.FIRST_LINE).removeprefix(b"port = 9443\n")
    with pytest.raises(Stop, match="one id"):
        settings.parse(two)


@given(st.binary(max_size=300))
def test_any_disk_is_read_or_refused(content: bytes) -> None:
    with pytest.raises(Stop):
        settings.parse(settings.FIRST_LINE + content)


def test_the_settings_disk_is_found_by_its_first_line(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    (tmp_path / "dev").mkdir()
    for name, content in (("vda", b"x" * 4096), ("vdb", disk() + bytes(512))):
        (tmp_path / "sys" / name).mkdir()
        (tmp_path / "dev" / name).write_bytes(content)
    (tmp_path / "sys/sr0").mkdir()
    assert disks.find_settings(tmp_path / "sys", tmp_path / "dev") == disk() + bytes(512)
    (tmp_path / "dev/vda").write_bytes(disk())
    with pytest.raises(Stop, match="several"):
        disks.find_settings(tmp_path / "sys", tmp_path / "dev")


def test_a_processor_without_avx2_is_refused_by_one_line() -> None:
    flags = " ".join(machine.CPU_FLAGS)
    machine.check_processor(f"flags\t\t: fpu {flags}\nflags\t\t: fpu {flags}\n")
    for text in (f"flags : {flags}\nflags : {flags.replace('avx2', '')}\n", "", "flags : fpu\n"):
        with pytest.raises(Stop, match="avx2"):
            machine.check_processor(text)


def test_too_little_memory_is_refused_with_the_numbers() -> None:
    meminfo = "MemTotal:        1024000 kB\nMemAvailable:     512000 kB\n"
    machine.check_memory(meminfo, 100 << 20)
    with pytest.raises(Stop, match="500 MiB available, at least 584 MiB needed"):
        machine.check_memory(meminfo, 200 << 20)


def test_memory_in_use_is_what_can_neither_be_dropped_nor_is_free() -> None:
    kib = {"MemTotal": 2000, "MemFree": 1000, "MemAvailable": 900, "Buffers": 50, "Cached": 300, "SwapCached": 0}
    kib |= {"AnonPages": 480, "Mapped": 80, "Shmem": 100, "SReclaimable": 20, "SUnreclaim": 15}
    meminfo = "".join(f"{name}:{value * 1024:>12} kB\n" for name, value in kib.items())
    # 2000 in all, 1000 free; 50 + (300 - 100) + 20 could be dropped.
    said = "730 of 2000 MiB in use (processes 480, files in memory 100, kernel 150; caches 270 more)"
    assert machine.memory_in_use(meminfo) == said


def test_a_disk_that_ends_early_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.write_bytes(bytes(5000))
    machine.read_whole(path, 5000, "root")
    with pytest.raises(Stop, match="the root disk is corrupt"):
        machine.read_whole(path, 8192, "root")
    with pytest.raises(Stop, match="the model disk is corrupt"):
        machine.read_whole(tmp_path / "absent", 1, "model")


def test_devices_and_an_entry_for_reports_are_handed_over(tmp_path: Path) -> None:
    dev, reports = tmp_path / "dev", tmp_path / "report"
    dev.mkdir()
    (dev / "tpmrm0").write_bytes(b"")
    assert machine.hand_over(os.getuid(), dev=dev, reports=reports) == ("tpmrm0",)
    assert (dev / "tpmrm0").stat().st_mode & 0o777 == 0o600
    reports.mkdir()
    assert machine.hand_over(os.getuid(), dev=dev, reports=reports) == ("tpmrm0", "tsm")
    assert [path.name for path in reports.iterdir()] == [tsm.HANDED_OVER]


ASKING = dhcp.Asking(mac=bytes.fromhex("525400123456"), xid=0x12345678)


def answer(kind: int = dhcp.OFFER, *, xid: int = ASKING.xid, options: bytes | None = None) -> bytes:
    head = struct.pack(
        "!BBBBIHH4s4s4s4s16s64s128s",
        2,
        1,
        6,
        0,
        xid,
        0,
        0,
        bytes(4),
        bytes([10, 0, 2, 15]),
        bytes(4),
        bytes(4),
        ASKING.mac,
        b"",
        b"",
    )
    if options is None:
        options = bytes([1, 4, 255, 255, 255, 0, 3, 4, 10, 0, 2, 2, 51, 4, 0, 1, 81, 128, 54, 4, 10, 0, 2, 2])
    return head + b"\x63\x82\x53\x63" + bytes([53, 1, kind]) + options + b"\xff"


def test_an_offer_is_read() -> None:
    found = dhcp.parse(answer(), ASKING)
    assert found is not None
    kind, lease = found
    assert kind == dhcp.OFFER
    assert str(lease.address) == "10.0.2.15/24"
    assert (lease.gateway, lease.lease_s) == (ipaddress.IPv4Address("10.0.2.2"), 86400)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        answer(xid=1),
        answer()[:200],
        answer(options=b""),
        answer(options=bytes([1, 4, 255, 0, 255, 0, 51, 4, 0, 0, 0, 1, 54, 4, 1, 1, 1, 1])),
        answer(options=bytes([1, 200, 255])),
        answer(options=bytes([1, 4, 255, 255, 255, 0, 3, 3, 1, 1, 1, 51, 4, 0, 0, 0, 1, 54, 4, 1, 1, 1, 1])),
        answer() + bytes(1500),
    ],
)
def test_an_odd_answer_is_passed_over(message: bytes) -> None:
    assert dhcp.parse(message, ASKING) is None


@given(st.binary(max_size=600))
def test_any_answer_is_read_or_passed_over(content: bytes) -> None:
    dhcp.parse(content, ASKING)
    dhcp.parse(answer(options=content), ASKING)


def test_a_lease_is_obtained_in_two_steps_and_lost_messages_are_sent_again() -> None:
    sent: list[int] = []

    def exchange(message: bytes, kind: int, asking: dhcp.Asking) -> dhcp.Lease | None:
        sent.append(message[message.index(b"\x63\x82\x53\x63") + 6])
        if len(sent) == 1:
            return None
        found = dhcp.parse(answer(kind), asking)
        assert found is not None
        return found[1]

    lease = dhcp.obtain(ASKING, exchange, tries=3)
    assert lease is not None
    assert sent == [dhcp.DISCOVER, dhcp.DISCOVER, dhcp.REQUEST]
    assert dhcp.obtain(ASKING, lambda *_: None, tries=2) is None


def test_what_the_service_prints_is_not_what_the_console_shows() -> None:
    output = service.Output()
    output.feed(b"2026 INFO a prompt: hello\nappliance: no TPM \x1b[31m\nServ")
    assert (output.refusal, output.ready) == ("no TPM ?[31m", False)
    output.feed(b"ing smollm2 on https://0.0.0.0:8443\n")
    assert output.ready
    output.feed(b"x" * 100_000)
    output.feed(b"\n")


def test_the_lines_that_init_looks_for_are_those_that_the_appliance_prints() -> None:
    text = (Path(__file__).parents[3] / "appliance/cli/main.py").read_text(encoding="utf-8")
    assert f'f"{service.READY.decode()}{{names}} on ' in text
    assert f'click.echo(f"{service.REFUSAL.decode()}{{error}}", err=True)' in text


def test_the_power_key_is_one_event_among_others() -> None:
    event = struct.Struct("qqHHi")
    assert service.is_pressed(event.pack(1, 2, 0, 0, 0) + event.pack(1, 2, 1, 116, 1) + b"xx")
    assert not service.is_pressed(event.pack(1, 2, 1, 116, 0) + event.pack(1, 2, 1, 30, 1))


def watch(ready: list[str]) -> service.Watch:
    return service.Watch(on_ready=lambda: ready.append("ready"), on_tick=lambda: 60.0, tick_s=60.0)


def child(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)


def test_a_refusal_of_the_service_is_why_the_machine_ends() -> None:
    code = "import sys; print('appliance: the attester makes no evidence', file=sys.stderr); sys.exit(1)"
    assert service.supervise(child(code), [], watch([])) == "the attester makes no evidence"


def test_a_service_that_dies_is_told_by_its_signal_and_what_it_printed_is_not() -> None:
    ready: list[str] = []
    code = "import os, sys, time; print('Serving x\\nsecret prompt', file=sys.stderr, flush=True); time.sleep(0.5)"
    code += "; os.kill(os.getpid(), 9)"
    assert service.supervise(child(code), [], watch(ready)) == "the service ended by itself (signal 9)"
    assert ready == ["ready"]


def test_the_power_button_ends_the_service_first(tmp_path: Path) -> None:
    button = tmp_path / "button"
    os.mkfifo(button)
    held = os.open(button, os.O_RDWR)
    os.write(held, struct.pack("qqHHi", 1, 2, 1, 116, 1))
    process = child("import time; time.sleep(60)")
    try:
        assert service.supervise(process, [button], watch([])) == "the power button was pressed"
        assert process.returncode == -15
    finally:
        os.close(held)
        process.kill()


def test_the_service_gets_a_fixed_file_and_the_models_of_its_disk(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    with pytest.raises(Stop, match="no model"):
        service.installed(tmp_path)
    for name in ("small", "large-v1.5"):
        (tmp_path / f"manifests/{name}.json").touch()
    command = service.command("tpm2", service.installed(tmp_path), ("0.0.0.0:8443",))
    assert command[3:] == [
        "appliance",
        "serve",
        "--config",
        "/etc/appliance/appliance.toml",
        "--attester",
        "tpm2",
        "--model",
        "large-v1.5",
        "--model",
        "small",
        "--listen",
        "0.0.0.0:8443",
    ]


def test_the_key_file_is_json_of_the_known_form() -> None:
    document = json.loads(settings.key_file(settings.parse(disk())))
    assert document["version"] == 1
