# The command line of the shell recipes. Sourced.
#
#   build=build/release
#   read_arguments "build" "$@"
#
# --NAME VALUE sets the variable NAME, if it is among the known ones. --help prints the first comment of the script. Anything
# else is one line and status 2.
read_arguments() {
  local known=$1
  shift
  while [[ $# -gt 0 ]]; do
    local name=${1#--}
    if [[ $1 == -h || $1 == --help ]]; then
      sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$(dirname "${BASH_SOURCE[0]}")/$(basename "$0")"
      exit 0
    fi
    if [[ $1 != --* || " $known " != *" $name "* ]]; then
      echo "$0: '$1' is not known: expected --help${known:+ or --${known// / or --}}" >&2
      exit 2
    fi
    if [[ $# -lt 2 ]]; then
      echo "$0: $1 needs a value" >&2
      exit 2
    fi
    printf -v "$name" %s "$2"
    shift 2
  done
}

# has_program FILE: ends with status 2 unless there is one.
has_program() {
  [[ -x $1 ]] || { echo "$0: no program '$1'; build it, or give --build" >&2; exit 2; }
}
