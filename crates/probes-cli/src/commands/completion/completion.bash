# Completion of ocaml-probes for bash. ocaml-probes says itself what can come next.

# _ocaml_probes_unquote WORD: sets `unquoted` to what the shell makes of a word, and `quote` to the quote that it leaves open.
_ocaml_probes_unquote() {
	local rest=$1 char
	unquoted= quote=
	while [[ -n $rest ]]; do
		char=${rest:0:1} rest=${rest:1}
		if [[ $char == "$quote" ]]; then
			quote=
		elif [[ -z $quote && $char == [\'\"] ]]; then
			quote=$char
		elif [[ $char == \\ && ( -z $quote || $quote == \" && $rest == [\"\\\$\`]* ) ]]; then
			unquoted+=${rest:0:1} rest=${rest:1}
		else
			unquoted+=$char
		fi
	done
}

_ocaml_probes() {
	local line=${COMP_LINE:0:COMP_POINT} words=() i word separate
	# bash makes words of their own of `=` and `:`: what has no space between is one word.
	for ((i = 0; i < COMP_CWORD; i++)); do
		separate=${line%%[![:space:]]*}
		line=${line#"$separate"}
		word=${COMP_WORDS[i]}
		line=${line#"$word"}
		if [[ -n $separate || $i -eq 0 ]]; then
			words+=("$word")
		else
			words[${#words[@]} - 1]+=$word
		fi
	done
	separate=${line%%[![:space:]]*}
	line=${line#"$separate"}
	# What bash replaces, and what it leaves in front of that.
	local current=$line before=
	[[ $current != [=:] ]] || current=
	if [[ -n $separate ]]; then
		words+=("$line")
	else
		before=${words[${#words[@]} - 1]}
		[[ -n $current ]] || before+=$line
		words[${#words[@]} - 1]+=$line
	fi
	local unquoted quote
	for i in "${!words[@]}"; do
		_ocaml_probes_unquote "${words[i]}"
		words[i]=$unquoted
	done
	# What bash replaces begins after a quote that is open.
	local open=$quote
	_ocaml_probes_unquote "$before"
	before=$unquoted
	local value meaning values=() meanings=() longest=0
	while IFS=$'\t' read -r value meaning; do
		# \ stands for an empty word: read would pass over it.
		if [[ $value == '\' && $meaning == files ]]; then
			compopt -o filenames 2>/dev/null
			mapfile -t COMPREPLY < <(compgen -f -- "$current")
			return
		fi
		value=${value#"$before"}
		# Also where %q quotes more than it has to, as commas.
		[[ -n $open || $value =~ ^[[:alnum:]_./,:=@%+-]+$ ]] || printf -v value %q "$value"
		values+=("$value")
		meanings+=("$meaning")
		((${#value} <= longest)) || longest=${#value}
	done < <("${words[0]}" completion -answer -- "${words[@]:1}" 2>/dev/null | sed 's/^\t/\\\t/')
	COMPREPLY=("${values[@]}")
	if ((${#values[@]} == 1)); then
		[[ $value != *. ]] || compopt -o nospace
	elif [[ $COMP_TYPE == 63 || $COMP_TYPE == 9 ]]; then
		# Several are only shown: with what they mean.
		for i in "${!values[@]}"; do
			[[ -z ${meanings[i]} ]] || printf -v "COMPREPLY[$i]" '%-*s  (%s)' "$longest" "${values[i]}" "${meanings[i]}"
		done
	fi
}

complete -o nosort -F _ocaml_probes ocaml-probes 2>/dev/null || complete -F _ocaml_probes ocaml-probes
