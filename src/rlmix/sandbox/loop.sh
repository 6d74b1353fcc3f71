# Body of a sandbox's first process; shell.py writes the settings in front of it.
#
# It copies the repository in, then serves requests from descriptor 3, one at a time: a verb and a
# text, each ended by NUL. Each answer is one line there (or on 4): exit status, and 1 when `submit` ran.
# The commands' own output goes to descriptor 1 and never to 3.

export PATH="$static/bin:$path" HOME="$home" TMPDIR="$home"
export LANG=C.UTF-8 TERM=dumb NO_COLOR=1 PAGER=cat GIT_PAGER=cat
export GIT_TERMINAL_PROMPT=0 GIT_OPTIONAL_LOCKS=0 GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_NAME=agent GIT_AUTHOR_EMAIL=agent@localhost
export GIT_COMMITTER_NAME=agent GIT_COMMITTER_EMAIL=agent@localhost
export PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0 PYTHONUTF8=1
((${#extra_env[@]})) && export "${extra_env[@]}"

# Hard limits: nobody in here has the right to raise them again.
ulimit -c 0
ulimit -n 512
ulimit -f "$file_kib"
[[ $memory_kib ]] && ulimit -v "$memory_kib"
[[ $pids ]] && ulimit -u "$pids"
umask 022

stop() {
  case $stop_by in
  all) kill -9 -1 ;; # Whoever this one may signal: its pid namespace, user id or Landlock domain.
  group) kill -9 -- "-$child" ;;
  tree)
    # Orphans come here, so killing the children until none is left ends everything below.
    local tries children
    for ((tries = 0; tries < 2000; tries += 1)); do
      read -r children <"/proc/$$/task/$$/children" # No line end, so `read` says it failed.
      [[ $children ]] || break
      kill -9 $children
    done
    ;;
  esac
}

run() {
  # A long command does not fit into one argument.
  if ((${#1} > 30000)); then
    printf '%s' "$1" >"$scratch/command" || exit
    set -- "$scratch/command"
  else
    set -- -c "$1"
  fi
  ulimit -t "$cpu_s"
  cd "$repo" || cd /
  trap - INT QUIT
  if [[ $stop_by = group ]]; then
    exec setsid /bin/bash "$@"
  else
    exec -a bash /bin/bash "$@"
  fi
}

# The index starts from the base commit and objects go to a private folder, so that nothing of the
# repository's own .git is read. Its path is skipped by git like any .git at the top.
capture() {
  export GIT_DIR="$base/capture" GIT_WORK_TREE="$repo" GIT_INDEX_FILE="$scratch/index"
  export GIT_OBJECT_DIRECTORY="$scratch" GIT_CONFIG_GLOBAL=/dev/null
  export GIT_ALTERNATE_OBJECT_DIRECTORIES="$base/repo/.git/objects"
  local kind=${1%% *} commit=${1##* }
  if [[ $kind = repair ]]; then
    chmod -R u+rwX "$repo"
    find "$home" "$scratch" -mindepth 1 -maxdepth 1 ! -path "$scratch" -exec rm -rf {} +
  fi
  exec 2>"$scratch/errors"
  cd "$repo" && git read-tree "$commit" && git add -A . || exit
  # A warning means that git passed something over, such as a folder it may not read.
  [[ $kind = plain && -s $scratch/errors ]] && exit 1
  exec git diff --cached --binary --full-index --no-renames --no-ext-diff --no-textconv \
      --no-color --src-prefix=a/ --dst-prefix=b/ "$commit" --
}

# `wait` returns early when a trapped signal arrives. A second call then often does not know the
# child's status any more (bash 5.2 says -1 or 127); only a stopped command comes here.
finish() {
  wait "$child"
  status=$?
  while [[ $interrupted ]]; do
    interrupted=
    wait "$child"
    status=137
  done
}

cp -R --preserve=mode,timestamps "$base/repo/." "$repo" || exit
cd "$repo" || exit
interrupted= number=0 child=
trap 'interrupted=1; stop' USR1
trap 'interrupted=1' INT
printf 'ready\n' >&"$answers"
exec 2>/dev/null

while IFS= read -r -d '' -u 3 verb && IFS= read -r -d '' -u 3 text; do
  ((number += 1))
  interrupted= # A stop that came between two commands is not this one's.
  export RLMIX_SUBMIT="$scratch/submitted.$number"
  case $verb in
  run)
    run "$text" </dev/null 3<&- 4>&- 2>&1 &
    ;;
  capture)
    stop
    capture "$text" </dev/null 3<&- 4>&- &
    ;;
  errors)
    head -c 2000 "$scratch/errors" </dev/null 3<&- 4>&- 2>&1 &
    ;;
  esac
  child=$!
  finish
  submitted=0
  [[ -e $RLMIX_SUBMIT ]] && submitted=1
  printf '%d %d\n' "$status" "$submitted" >&"$answers"
done
