# Sourced by ci/test, after environment.sh: has the servers that remote tiers are tested with, or stops.
# REQUIRE_SERVERS  empty to go on without them; the tests that need one are skipped then (1)

export REQUIRE_SERVERS=${REQUIRE_SERVERS-1}

have_servers() { # redis-server and openssl, and the library that Mooncake is linked with
    command -v redis-server openssl >/dev/null && ldconfig -p | grep -q 'libibverbs\.so\.1'
}

install_servers() { # only in a container or the like: on others' machines it is for them to say
    local packages="redis-server openssl libibverbs1 libnuma1 libcurl4"
    if [ -z "$REQUIRE_SERVERS" ] || have_servers; then
        return
    fi
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        stop "the tests of remote tiers need $packages (their names in Debian): install them, or skip these" \
            "tests with REQUIRE_SERVERS= $0"
    fi
    run_quietly "Reading the list of packages" apt-get update
    # shellcheck disable=SC2086  # several
    run_quietly "Installing $packages" \
        env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $packages
}
