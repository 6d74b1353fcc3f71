#!/bin/bash
cd /app && git apply /solution/gold_patch.diff
