# Sourced: the options of a script, each with a value, and the commands that it runs.
#
#   build=build/release ranks=2                # without the options
#   take_options build ranks -- "$@"           # --ranks 4 sets `ranks`; --help prints the comment at the head of the script
#   require_program "$build/bin/phalanx" --build
#
# What is no such option goes, in order, into `rest`; take_only_options refuses it.
#
#   quietly "$folder/log" "$phalanx" train ... # adds what it prints to that file; if it fails, shows its end and stops

take_options() {  # <names> -- <the script's arguments>
  local known=" "
  while [[ $1 != -- ]]; do known+="$1 "; shift; done
  shift
  rest=()
  while [[ $# -gt 0 ]]; do
    if [[ $1 == -h || $1 == --help ]]; then
      local script=$0
      [[ -f $script ]] || script=$OLDPWD/$0  # the script has changed the folder
      sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$script"
      exit 0
    elif [[ $1 == --* && $known == *" ${1#--} "* ]]; then
      [[ $# -gt 1 ]] || { echo "$0: $1 needs a value" >&2; exit 2; }
      printf -v "${1#--}" %s "$2"
      shift 2
    else
      rest+=("$1")
      shift
    fi
  done
}

take_only_options() {
  take_options "$@"
  [[ ${#rest[@]} -gt 0 ]] || return 0
  local known=
  while [[ $1 != -- ]]; do known+=" or --$1"; shift; done
  echo "$0: '${rest[0]}' is not known: expected --help$known" >&2
  exit 2
}

require_program() {  # <path> <the option that names it>
  [[ -x $1 ]] || { echo "$0: no program '$1'; build it, or give $2" >&2; exit 2; }
}

quietly() {  # <log file> <command>
  local log=$1 status=0
  shift
  "$@" >>"$log" 2>&1 || status=$?
  [[ $status == 0 ]] || { tail -n 30 "$log" >&2; exit "$status"; }
}
