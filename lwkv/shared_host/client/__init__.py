"""What an engine has of a node's memory: pages that it maps, and a host tier that asks the owner."""
