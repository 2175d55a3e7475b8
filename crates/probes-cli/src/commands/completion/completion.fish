# Completion of ocaml-probes for fish. ocaml-probes says itself what can come next.

function __ocaml_probes_complete
    set -l words
    for word in (commandline -opc)
        # It may be as it was typed, with its quotes.
        set -a words (string unescape -- $word; or echo $word)
    end
    # A quote may still be open.
    set -l typed (commandline -ct)
    set -l current (string unescape -- $typed; or string unescape -- $typed\'; or string unescape -- $typed\"; or echo $typed)
    set -l program $words[1]
    set -e words[1]
    for line in ($program completion -answer -- $words $current 2>/dev/null)
        switch $line
            case \tfiles
                # What comes before the value stays.
                set -l value (string replace -r '^-[^=]*=' '' -- $current)
                set -l before (string replace -r '^(-[^=]*=)?.*' '$1' -- $current)
                for file in (__fish_complete_path $value)
                    echo $before$file
                end
            case '*'
                echo $line
        end
    end
end

complete -c ocaml-probes -f -a '(__ocaml_probes_complete)'
