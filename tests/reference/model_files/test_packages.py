from __future__ import annotations

import pytest

from lwkv.errors import ConfigError
from lwkv.reference.model_files.packages import require_package


def test_a_package_that_is_not_installed_is_named_with_its_pip_line() -> None:
    with pytest.raises(
        ConfigError, match="reading tea leaves needs the package 'teapot9': pip install teapot9"
    ):
        require_package("teapot9", "reading tea leaves")
