from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from storage.places import make_setup

from lwkv.errors import ConfigError
from lwkv.storage.registry import open_tiers
from lwkv.storage.remote.client_probe import version_of, what_is_missing

glide_sync = pytest.importorskip("glide_sync")


def test_what_is_missing_is_named_in_order() -> None:
    module = SimpleNamespace(Client=SimpleNamespace(read=lambda keys, *, buffers: None), Options=int)
    needed = {"Client.read": ("buffers", "timeout"), "Client.write": ("x",), "Options": (), "Log.off": ()}
    assert what_is_missing(module, needed) == ["Client.read(timeout)", "Client.write", "Log.off"]


def test_a_package_that_is_not_installed_has_no_known_version() -> None:
    assert version_of("no-such-package-of-anybody") == "of unknown version"
    assert version_of("numpy")[0].isdigit()


class Without:
    """A module or class of a client, but for one attribute; inside it another thing stands for another."""

    def __init__(self, whole: Any, name: str, instead: Any = None) -> None:
        self._whole, self._name, self._instead = whole, name, instead

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            if self._instead is None:
                raise AttributeError(name)
            return self._instead
        return getattr(self._whole, name)


def old_read(self: object, request_type: object, arguments: object) -> None:
    """As clients before 2.6 have it."""


def old_configuration(addresses: object, use_tls: bool = False, credentials: object = None) -> None:
    """As clients before 2.2 have it."""


@pytest.mark.parametrize(
    ("name", "instead", "told"),
    [
        (
            "GlideClient",
            Without(glide_sync.GlideClient, "_execute_command", old_read),
            r"GlideClient._execute_command\(response_buffers\)",
        ),
        ("TlsAdvancedConfiguration", None, "lacks TlsAdvancedConfiguration"),
        ("GlideClientConfiguration", old_configuration, r"GlideClientConfiguration\(advanced_config\)"),
        ("Logger", None, "lacks Logger.init"),
    ],
)
def test_an_old_client_of_valkey_is_refused_at_the_start(
    name: str, instead: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "glide_sync", Without(glide_sync, name, instead))
    wanted = rf"valkey://here:6379: valkey-glide-sync .* 2\.6 or later is needed.*{told}.*pip install"
    with pytest.raises(ConfigError, match=wanted):
        open_tiers(make_setup(5, 3, remote_url="valkey://here"))


@pytest.mark.parametrize(
    "lacking", ["batch_put_from_multi_buffers", "batch_get_into_multi_buffers", "batch_is_exist"]
)
def test_an_old_client_of_mooncake_is_refused_at_the_start(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = pytest.importorskip("mooncake.store")
    old = ModuleType("mooncake.store")
    old.MooncakeDistributedStore = Without(store.MooncakeDistributedStore, lacking)  # type: ignore[attr-defined]
    old.ReplicateConfig = store.ReplicateConfig  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake.store", old)
    monkeypatch.setattr("mooncake.store", old)
    wanted = (
        rf"mooncake://here:.* 0\.3\.13\.post1 is needed: it lacks MooncakeDistributedStore.{lacking}; pip"
    )
    with pytest.raises(ConfigError, match=wanted):
        open_tiers(make_setup(5, 3, remote_url="mooncake://here"))
