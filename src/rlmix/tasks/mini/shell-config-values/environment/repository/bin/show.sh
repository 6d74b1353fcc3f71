#!/bin/bash
. "$(dirname "$0")/../lib/config.sh"
echo "$2: $(config_get "$1" "$2")"
