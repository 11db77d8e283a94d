"""Which tiers a configuration names, and who opens them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from oracle import Oracle
from storage.faulty_tier import FaultyTier
from storage.places import make_setup

from lwkv import CacheEngine, CacheMetadata
from lwkv.cli.doctor.report import Report
from lwkv.cli.doctor.tiers import examine_tiers
from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.platforms import detect_platform
from lwkv.storage import Tier, TierSetup, registry

DISK = {"max_local_disk_size": 0.1}


class SomebodysTiers(ModuleType):
    """A module as a package of somebody's has it; `opened` has the tiers by the URL of each."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("somebodys_tiers")
        self.opened: dict[str, FaultyTier] = {}
        self._error = error

    def open_tier(self, url: str, setup: TierSetup) -> Tier:
        if self._error is not None:
            raise self._error
        self.opened[url] = FaultyTier("theirs")
        return self.opened[url]

    def examine(self, url: str, config: Config) -> Mapping[str, str]:
        return {"chunks": str(config.chunk_size)}


def install(monkeypatch: pytest.MonkeyPatch, module: ModuleType, scheme: str = "theirs") -> None:
    entry = EntryPoint(scheme, module.__name__, registry.GROUP)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == registry.GROUP else [])


def test_no_tier_is_opened_unless_it_is_asked_for() -> None:
    assert registry.open_tiers(make_setup(5, 3)) == []


def test_a_package_brings_a_tier_by_its_entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs = SomebodysTiers()
    install(monkeypatch, theirs)
    settings = {"local_disk": str(tmp_path), "remote_url": "theirs://host:1/x", **DISK}
    opened = registry.open_tiers(make_setup(5, 3, **settings))
    assert [tier.name for tier in opened] == ["disk", "theirs"], "nearest first"
    assert list(theirs.opened) == ["theirs://host:1/x"]
    assert registry.examine_tier("theirs://host:1/x", Config(**settings)) == {"chunks": "256"}
    for tier in opened:
        tier.close()


def test_a_scheme_that_nobody_serves_is_reported_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, SomebodysTiers())
    told = r"no tier for s3://; allowed: file://, .*theirs://.*entry point lwkv.tiers"
    with pytest.raises(ConfigError, match=told) as error:
        registry.open_tiers(make_setup(5, 3, remote_url="s3://me:secret@bucket"))
    assert "secret" not in str(error.value)


def test_two_packages_that_serve_one_scheme_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, SomebodysTiers(), scheme="file")
    with pytest.raises(ConfigError, match=r"two tiers serve file://: lwkv.*disk.tier and somebodys_tiers"):
        registry.open_tiers(make_setup(5, 3, local_disk=str(tmp_path), **DISK))


def test_a_module_that_cannot_be_imported_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, SomebodysTiers())
    monkeypatch.setitem(sys.modules, "somebodys_tiers", None)
    with pytest.raises(ConfigError, match="the tier for theirs:// cannot be loaded: somebodys_tiers raised"):
        registry.open_tiers(make_setup(5, 3, remote_url="theirs://host"))


class Dist:
    """The package of an entry point."""

    name = "their-package"


def install_package(monkeypatch: pytest.MonkeyPatch, module: object, value: str = "their_module") -> None:
    """As `install`, with a package that has a name; `module` need not be one."""
    entry = EntryPoint("theirs", value, registry.GROUP)._for(Dist())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_module", module)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == registry.GROUP else [])


URL = "theirs://me:s3cret%20word@host/x"
HOME = "their_module of package 'their-package'"


def refusal(setup: TierSetup | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        registry.open_tiers(setup or make_setup(5, 3, remote_url=URL))
    assert "s3cret" not in str(refused.value)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def make_one_with_two() -> None:
    """A factory where a module should be."""


class Opens:
    """A module whose `open_tier` returns or raises this."""

    def __init__(self, what: object) -> None:
        self._what = what

    def open_tier(self, url: str, setup: TierSetup) -> object:
        if isinstance(self._what, Exception):
            raise self._what
        return self._what

    def examine(self, url: str, config: Config) -> object:
        return self.open_tier(url, make_setup(5, 3))


class Half:
    name = "half"

    def contains(self, keys: object, deadline_s: float) -> None: ...

    def close(self) -> None: ...


BROKEN: dict[str, tuple[object, str]] = {
    "no module": (ModuleType("empty"), f"opened: {HOME} raised AttributeError: "),
    "a factory": (SimpleNamespace(open_tier=make_one_with_two), f"opened: {HOME} raised TypeError: "),
    "an error with the login": (
        Opens(KeyError("me:s3cret%20word")),
        f"opened: {HOME} raised KeyError: '***'",
    ),
    "an error with the password": (Opens(OSError("s3cret word")), f"opened: {HOME} raised OSError: ***"),
    "nothing": (
        Opens(None),
        f"opened: what {HOME} made, None, is no lwkv.storage.Tier: it lacks a name, con",
    ),
    "half a tier": (Opens(Half()), "is no lwkv.storage.Tier: it lacks get(keys, pages, deadline_s), put("),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_package_is_refused_in_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    module, told = BROKEN[how]
    install_package(monkeypatch, module)
    assert f"the tier for theirs:// cannot be {told}" in refusal() or told in refusal()


@pytest.mark.parametrize("module", [ModuleType("empty"), Opens(RuntimeError("broken")), Opens(None)])
def test_the_doctor_has_one_line_of_a_broken_package(monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    install_package(monkeypatch, module)
    report = Report({})
    examine_tiers(report, Config(remote_url=URL))
    (fault,) = report.faults
    assert f"the tier for theirs:// cannot be examined: {HOME} raised " in fault
    assert "s3cret" not in fault


def test_an_entry_point_may_name_an_attribute_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = SomebodysTiers()
    install_package(monkeypatch, SimpleNamespace(Tiers=SimpleNamespace(A=theirs)), "their_module:Tiers.A")
    [tier] = registry.open_tiers(make_setup(5, 3, remote_url=URL))
    assert tier is theirs.opened[URL]


@pytest.mark.parametrize("url", ["theirs:///folder", "theirs://host", "theirs://x/y?z"])
def test_an_address_of_theirs_may_have_no_host(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    theirs = SomebodysTiers()
    install_package(monkeypatch, theirs)
    registry.open_tiers(make_setup(5, 3, remote_url=url))
    assert list(theirs.opened) == [url]


@pytest.mark.parametrize("name", ["host", "disk", "theirs"])
def test_a_name_that_is_taken_is_refused_and_what_was_opened_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    install(monkeypatch, theirs := SomebodysTiers())
    setup = make_setup(5, 3, local_disk=str(tmp_path), remote_url="theirs://host", **DISK)
    with pytest.raises(ConfigError, match=f"two tiers are called '{name}'.*taken are: host"):
        registry.open_tiers(setup, [FaultyTier(name)])
    assert theirs.opened["theirs://host"].calls_of("close") == [[]]


def test_where_one_tier_cannot_be_opened_none_stays_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed: list[str] = []
    monkeypatch.setattr("lwkv.storage.disk.tier.DiskTier.close", lambda tier: closed.append(tier.name))
    install(monkeypatch, SomebodysTiers(ConfigError("no such bucket")))
    with pytest.raises(ConfigError, match="no such bucket"):
        registry.open_tiers(make_setup(5, 3, local_disk=str(tmp_path), remote_url="theirs://host", **DISK))
    assert closed == ["disk"]


def test_an_engine_that_cannot_be_made_closes_its_tiers() -> None:
    platform = detect_platform()
    oracle = Oracle(platform, platform.current_device())
    tier = FaultyTier()
    metadata = CacheMetadata("toy", oracle.dims.layers, 2, 3, oracle.dims.dtype)
    with oracle.engine() as engine, pytest.raises(ConfigError, match="belongs to an engine"):
        CacheEngine(engine.config, metadata, engine.connector, [tier])
    assert tier.calls_of("close") == [[]]


def test_a_relative_folder_is_named_in_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config(local_disk="d1/tier", max_local_disk_size=1)
    assert registry.tier_urls(config) == [f"file://{tmp_path}/d1/tier"]
