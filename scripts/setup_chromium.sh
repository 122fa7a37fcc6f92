#!/usr/bin/env bash
# Installs Debian's Chromium, by which scripts/report.py takes pictures and its tests look at the page.
#
# Does nothing where there is one, and says what to do, and succeeds, where it cannot be installed: no apt-get, or not
# root.
set -euo pipefail
if [ "${1:-}" != "" ]; then
    echo "usage: scripts/setup_chromium.sh (no arguments): installs Debian's chromium, if there is none" >&2
    [ "$1" = "--help" ] || [ "$1" = "-h" ]
    exit $?
fi
for name in chromium chromium-browser google-chrome; do
    if command -v "$name"; then
        exit 0
    fi
done
hint="no Chromium: install one, or leave it (the tests of the report's page are skipped, and it has no --png)"
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "$hint"
    exit 0
fi
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
if { apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core; } >"$log" 2>&1 </dev/null; then
    command -v chromium
else
    tail -n 3 "$log" # why
    echo "$hint"
fi
