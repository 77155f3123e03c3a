"""Reports through configfs-tsm and /dev/sev-guest: the kernel's rules kept, its failures told, nobody's mixed up."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from appliance.attestation.attester import ATTESTERS, Attester, Binding
from appliance.attestation.families import sev_guest, snp, tdx, tsm
from appliance.attestation.families.snp import SnpAttester
from appliance.attestation.families.tdx import TdxAttester
from appliance.attestation.families.tsm import Tsm, TsmReport
from appliance.config.settings import AttestationConfig
from appliance.errors import AttestationUnavailable
from client_sdk.tee.snp import abi
from client_sdk.tee.tdx.abi import parse_quote
from client_sdk.wire.attestation import EvidenceItem
from tests.simulators import amd
from tests.simulators.tsm import Machine, MountError, mounted, why_not

DATA = bytes(range(64))
CHIP = amd.chip()
CONFIG = AttestationConfig()
BINDING = Binding(report_data=DATA, extra_data=b"e" * 32, nonce=b"n" * 32, spki=None)
QUOTE = Path(__file__).parents[4] / "vectors" / "tee" / "tdx" / "v5_90c06f_uptodate.quote.bin"
needs_fuse = pytest.mark.skipif(bool(why_not()), reason=why_not())

Mount = Callable[[Machine], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    with ExitStack() as stack:

        def mount_one(machine: Machine) -> Path:
            folder = tmp_path / f"tsm{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            return stack.enter_context(mounted(machine, folder))

        yield mount_one


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def client(root: Path, timeout_s: float = 10.0) -> tuple[Tsm, Time]:
    time = Time()
    made = Tsm(root, random_bytes=os.urandom, monotonic=time.monotonic, sleep=time.sleep, timeout_s=timeout_s)
    return made, time


def table() -> bytes:
    return amd.certificate_table({abi.GUIDS["VCEK"].bytes: CHIP.certificate, abi.GUIDS["ARK"].bytes: b"junk"})


def make_snp(inblob: bytes, level: int) -> tuple[bytes, bytes]:
    return amd.Report(report_data=inblob, vmpl=level).sign(CHIP.key), table()


def failing(make: Callable[[], object]) -> str:
    with pytest.raises(AttestationUnavailable) as caught:
        make()
    assert (caught.value.code, caught.value.retry_after_s) == ("evidence_failed", 5)
    return caught.value.message


# The simulator


@needs_fuse
def test_mounting_leaves_this_process_as_it_was(mount: Mount) -> None:
    """libfuse changes how its process takes signals, and where it is: a broken pipe then ends it without a word."""
    before = (signal.getsignal(signal.SIGPIPE), Path.cwd())
    mount(Machine(make=make_snp))
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        os.write(writing, b"x")
    os.close(writing)
    assert (signal.getsignal(signal.SIGPIPE), Path.cwd()) == before


def test_without_libfuse_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSE_LIBRARY_NAME", "no-such-library")
    with pytest.raises(MountError, match="Unable to find libfuse"), mounted(Machine(make=make_snp), tmp_path):
        pass


# configfs-tsm


@needs_fuse
def test_a_report_is_made_and_the_directory_is_gone(mount: Mount) -> None:
    machine = Machine(make=lambda inblob, level: (inblob[::-1] * 700, bytes([level]) * 8))
    made, time = client(mount(machine))
    assert made.provider() == "sev_guest"
    assert made.report(DATA, provider="sev_guest") == TsmReport(outblob=DATA[::-1] * 700, auxblob=bytes(8))
    assert (machine.reports, machine.made, time.now) == ({}, 1, 0.0)
    with pytest.raises(ValueError, match="64 bytes"):
        made.report(DATA[:63], provider="sev_guest")


@needs_fuse
def test_files_that_a_kernel_does_not_have_are_not_needed(mount: Mount) -> None:
    machine = Machine(make=make_snp, absent=frozenset({"auxblob", "privlevel", "privlevel_floor"}))
    made, _ = client(mount(machine))
    assert made.report(DATA, provider="sev_guest").auxblob == b""


@needs_fuse
def test_under_an_svsm_the_report_is_asked_for_at_the_lowest_level_there_is(mount: Mount) -> None:
    made, _ = client(mount(Machine(make=make_snp, floor=2)))
    assert abi.parse_report(made.report(DATA, provider="sev_guest").outblob).vmpl == 2


@needs_fuse
@pytest.mark.parametrize("code", [errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT])
def test_what_passes_is_tried_again(mount: Mount, code: int) -> None:
    machine = Machine(make=make_snp, failures=[code, code, code])
    made, time = client(mount(machine))
    made.report(DATA, provider="sev_guest")
    assert (machine.reports, round(time.now, 2)) == ({}, 0.14)


@needs_fuse
def test_what_somebody_else_wrote_into_is_thrown_away(mount: Mount) -> None:
    machine = Machine(make=make_snp, meddling=2)
    made, time = client(mount(machine))
    made.report(DATA, provider="sev_guest")
    assert machine.meddling == 0
    assert time.now > 0


@needs_fuse
def test_a_directory_that_was_handed_over_is_used_again_and_again(mount: Mount) -> None:
    machine = Machine(make=lambda inblob, _level: (inblob[::-1], b""))
    root = mount(machine)
    (root / tsm.HANDED_OVER).mkdir()
    found, _ = client(root)
    for number in range(3):
        data = bytes([number]) * 63 + b"x"
        assert found.report(data, provider="sev_guest").outblob == data[::-1]
    assert list(machine.reports) == [tsm.HANDED_OVER]
    machine.meddling = 1
    assert found.report(DATA, provider="sev_guest").outblob == DATA[::-1]
    assert machine.meddling == 0


@needs_fuse
def test_trying_again_has_an_end(mount: Mount) -> None:
    machine = Machine(make=make_snp, failures=[errno.EBUSY] * 1000)
    made, time = client(mount(machine), timeout_s=3.0)
    assert "busy" in failing(lambda: made.report(DATA, provider="sev_guest"))
    assert time.now <= 3.0
    assert machine.reports == {}


@needs_fuse
def test_what_does_not_pass_is_told(mount: Mount) -> None:
    machine = Machine(make=make_snp, failures=[errno.EIO])
    made, time = client(mount(machine))
    assert "EIO" in failing(lambda: made.report(DATA, provider="sev_guest"))
    assert "'sev_guest', not of 'tdx_guest'" in failing(lambda: made.report(DATA, provider="tdx_guest"))
    machine.provider = ""
    assert "ENXIO" in failing(made.provider)
    assert time.now == 0.0
    large, _ = client(mount(Machine(make=lambda _inblob, _level: (bytes(2 << 20), b""))))
    assert "larger than" in failing(lambda: large.report(DATA, provider="sev_guest"))


def test_without_the_directory_it_says_so(tmp_path: Path) -> None:
    assert "ENOENT" in failing(client(tmp_path / "none")[0].provider)
    assert "configfs" in str(tsm.missing(tmp_path / "none", "sev_guest"))


@needs_fuse
def test_what_is_missing_is_told(mount: Mount, tmp_path: Path) -> None:
    machine = Machine(make=make_snp)
    root = mount(machine)
    device = tmp_path / "sev-guest"
    assert snp.missing(CONFIG, root=root, device=device) is None
    assert "'sev_guest' here, not of 'tdx_guest'" in str(tdx.missing(CONFIG, root=root))
    machine.provider = "tdx_guest"
    assert tdx.missing(CONFIG, root=root) is None
    assert f"no {device} either" in str(snp.missing(CONFIG, root=root, device=device))
    device.touch()
    assert snp.missing(CONFIG, root=root, device=device) is None
    machine.provider = ""
    assert "ENXIO" in str(tdx.missing(CONFIG, root=root))


def test_auto_asks_for_memory_encryption_first() -> None:
    names = list(ATTESTERS)
    assert names[:2] == ["sev-snp", "tdx"]
    for name in names[:2]:
        assert "/sys/kernel/config/tsm/report" in str(ATTESTERS[name].missing(CONFIG)), "no such hardware here"


# Evidence


@needs_fuse
def test_snp_evidence_comes_with_the_host_s_certificates(mount: Mount) -> None:
    attester: Attester = snp.create(CONFIG, os.urandom, root=mount(Machine(make=make_snp)))
    assert (attester.family, attester.mode) == ("sev-snp", "production")
    collected = attester.collect(BINDING)
    (item,) = collected.evidence
    assert (item.kind, abi.parse_report(item.content).report_data) == ("sev-snp", DATA)
    assert collected.endorsements == (EvidenceItem(kind="certificates", content=CHIP.certificate),)
    assert collected.event_logs == ()


@pytest.mark.parametrize("auxblob", [b"", bytes(4096), b"\x01" * 100, b"\x01" * 24])
def test_a_table_without_certificates_gives_none(auxblob: bytes) -> None:
    attester = SnpAttester(lambda inblob: TsmReport(outblob=make_snp(inblob, 0)[0], auxblob=auxblob))
    assert attester.collect(BINDING).endorsements == ()


def test_reports_over_other_data_are_not_handed_out() -> None:
    other = make_snp(bytes(64), 0)[0]
    for outblob, words in ((other, "other data"), (b"", "1184 bytes"), (b"\xff" * 1184, "unsupported version")):
        attester = SnpAttester(lambda _inblob, outblob=outblob: TsmReport(outblob=outblob, auxblob=b""))  # type: ignore[misc]
        assert words in failing(lambda attester=attester: attester.collect(BINDING))  # type: ignore[misc]


@needs_fuse
def test_tdx_quotes_are_trimmed_and_come_with_the_boot_s_log(mount: Mount, tmp_path: Path) -> None:
    quote = QUOTE.read_bytes()
    log = tmp_path / "CCEL"
    log.write_bytes(b"log")
    root = mount(Machine(make=lambda _inblob, _level: (quote + bytes(3000), b""), provider="tdx_guest"))
    attester: Attester = tdx.create(CONFIG, os.urandom, root=root)
    assert (attester.family, attester.mode) == ("tdx", "production")
    assert "other data" in failing(lambda: attester.collect(BINDING))
    data = parse_quote(quote).report.report_data
    bound = Binding(report_data=data, extra_data=b"e" * 32, nonce=b"n" * 32, spki=None)
    source = tsm.default_client(root, os.urandom)
    for path, content in ((log, b"log"), (tmp_path / "none", None)):
        mine = TdxAttester(lambda inblob: source.report(inblob, provider="tdx_guest"), event_log=path)
        collected = mine.collect(bound)
        (item,) = collected.evidence
        assert (item.kind, quote.startswith(item.content), len(item.content) < len(quote) + 3000) == ("tdx", True, True)
        assert [(one.kind, one.content) for one in collected.event_logs] == ([("ccel", content)] if content else [])
    log.write_bytes(bytes(1 << 20))
    assert TdxAttester(lambda _: TsmReport(outblob=quote, auxblob=b""), event_log=log).collect(bound).event_logs == ()
    assert "unusable" in failing(lambda: TdxAttester(lambda _: TsmReport(outblob=b"x", auxblob=b"")).collect(bound))


# /dev/sev-guest


class Driver:
    """The ioctl: reads and writes the caller's memory as the kernel does. `refused` request numbers fail with EIO."""

    def __init__(self, *, refused: frozenset[int] = frozenset(), status: int = 0) -> None:
        self.refused = refused
        self.status = status
        self.asked: list[int] = []

    def __call__(self, _descriptor: int, number: int, message: ctypes.Structure) -> None:
        assert isinstance(message, sev_guest.GuestRequest)
        assert (ctypes.sizeof(message), message.msg_version) == (number >> 16 & 0x3FFF, 1)
        self.asked.append(number)
        if number in self.refused:
            raise OSError(errno.EIO, "refused")
        data = ctypes.string_at(message.req_data, 64)
        outblob, auxblob = make_snp(data, 0)
        if number == sev_guest.SNP_GET_EXT_REPORT:
            extended = sev_guest.ExtendedRequest.from_address(message.req_data)
            assert extended.certs_len % 4096 == 0
            ctypes.memmove(extended.certs_address, auxblob, len(auxblob))
        head = self.status.to_bytes(4, "little") + len(outblob).to_bytes(4, "little") + bytes(24)
        ctypes.memmove(message.resp_data, head + outblob, 32 + len(outblob))


def test_the_structures_have_the_kernel_s_sizes() -> None:
    sizes = {
        sev_guest.GuestRequest: 32,
        sev_guest.ReportRequest: 96,
        sev_guest.ExtendedRequest: 112,
        sev_guest.ReportResponse: 4000,
    }
    assert {kind: ctypes.sizeof(kind) for kind in sizes} == sizes


def test_the_device_gives_a_report_with_certificates(tmp_path: Path) -> None:
    device, driver = tmp_path / "sev-guest", Driver()
    device.touch()
    attester = SnpAttester(lambda inblob: sev_guest.report(inblob, device=device, ioctl=driver))
    collected = attester.collect(BINDING)
    assert abi.parse_report(collected.evidence[0].content).report_data == DATA
    assert [item.content for item in collected.endorsements] == [CHIP.certificate]
    assert driver.asked == [0xC0205302]


def test_a_host_without_certificates_gives_the_report_alone(tmp_path: Path) -> None:
    device, driver = tmp_path / "sev-guest", Driver(refused=frozenset({sev_guest.SNP_GET_EXT_REPORT}))
    device.touch()
    report = sev_guest.report(DATA, device=device, ioctl=driver)
    assert (abi.parse_report(report.outblob).report_data, report.auxblob) == (DATA, b"")
    assert driver.asked == [0xC0205302, 0xC0205300]


def test_a_device_that_makes_no_report_says_so(tmp_path: Path) -> None:
    device = tmp_path / "sev-guest"
    assert "ENOENT" in failing(lambda: sev_guest.report(DATA, device=device, ioctl=Driver()))
    device.touch()
    both = frozenset({sev_guest.SNP_GET_REPORT, sev_guest.SNP_GET_EXT_REPORT})
    assert "EIO" in failing(lambda: sev_guest.report(DATA, device=device, ioctl=Driver(refused=both)))
    assert "EIO" in failing(lambda: sev_guest.report(DATA, device=device, ioctl=Driver(status=0x16)))


def test_the_device_is_used_where_configfs_is_missing(tmp_path: Path) -> None:
    attester = snp.create(CONFIG, os.urandom, root=tmp_path / "none", device=tmp_path / "sev-guest")
    assert "sev-guest answers ENOENT" in failing(lambda: attester.collect(BINDING))
