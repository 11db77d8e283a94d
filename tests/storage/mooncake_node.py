"""A node of a Mooncake Store: arguments are its port and the master's."""

from __future__ import annotations

import sys
import time

from mooncake.store import MooncakeDistributedStore

if __name__ == "__main__":
    port, master = sys.argv[1:]
    store = MooncakeDistributedStore()
    code = store.setup(f"127.0.0.1:{port}", "P2PHANDSHAKE", 64 << 20, 0, "tcp", "", f"127.0.0.1:{master}")
    if code:
        sys.exit(f"no node: code {code}")
    print("ready", flush=True)
    time.sleep(3600)
