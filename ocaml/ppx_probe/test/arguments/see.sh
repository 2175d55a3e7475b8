# see.sh PROGRAM: prints the arguments of its notes by readelf, then, for each hit,
# the values that gdb reads at the site.
set -eu
program=$1

readelf -n "$program" | awk '
  /Name: / { name = $2 }
  /Arguments: / { sub(/^.*Arguments:/, ""); print name ":" $0 }' |
  sed 's/ *$//' | LC_ALL=C sort

# at NAME FORMAT EXPRESSION...: makes gdb print the expressions at each hit of the
# probe; A to F stand for the arguments of its note ($_probe_arg0 to $_probe_arg5).
at() {
  name=$1 format=$2
  shift 2
  printf 'break -probe-stap ocaml_2:%s\ncommands\nsilent\n' "$name"
  printf 'printf "%s %%d: %s\\n", $_probe_argc' "$name" "$format"
  for expression; do
    printf ', %s' "$expression" |
      sed 's/\<A\>/$_probe_arg0/;s/\<B\>/$_probe_arg1/;s/\<C\>/$_probe_arg2/
           s/\<D\>/$_probe_arg3/;s/\<E\>/$_probe_arg4/;s/\<F\>/$_probe_arg5/'
  done
  printf '\ncontinue\nend\n'
}

int() { echo "(long)$1 >> 1"; }
string() { echo "(char *)$1"; }
tag() { echo "*(unsigned char *)((long)$1 - 8)"; }

{
  echo 'set breakpoint pending off'
  at none ''
  at ints '%ld %ld %ld %ld %ld %ld' \
    "$(int A)" "$(int B)" "$(int C)" "$(int D)" "$(int E)" "$(int F)"
  at strings '%s, %s, %s, %s, %s' "$(string A)" "$(string B)" "$(string C)" \
    "$(string D)" "$(string E)"
  at computed '%ld %ld %ld %ld' "$(int A)" "$(int B)" "$(int C)" "$(int D)"
  at elsewhere '%s, %s' "$(string A)" "$(string B)"
  at instance '%ld %ld' "$(int A)" "$(int B)"
  at polymorphic '%d' '(long)A & 1'
  at collecting '%.8s, tag %d, %g' "$(string A)" "$(tag B)" '*(double *)C'
  echo 'run > /dev/null'
} >commands.gdb
gdb -batch -nx -x commands.gdb "$program" >gdb.out 2>gdb.log
grep -q '^collecting ' gdb.out || {
  cat gdb.log >&2
  exit 1
}
sed -n 's/ *$//;/^[a-z]* [0-6]:/p' gdb.out
