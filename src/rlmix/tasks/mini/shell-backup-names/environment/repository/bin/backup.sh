#!/bin/bash
cd $1
mkdir -p backup
for file in $(ls); do
  cp -r $file backup/
done
