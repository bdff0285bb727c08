_haiprof() {
    local word="${COMP_WORDS[COMP_CWORD]}" first="${COMP_WORDS[1]}"
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 && $word != -* ]]; then
        COMPREPLY=($(compgen -W "@WORDS@" -- "$word") $(compgen -f -- "$word"))
    elif [[ $COMP_CWORD -eq 2 && $first == trace ]]; then
        COMPREPLY=($(compgen -W "@TRACE@" -- "$word") $(compgen -f -- "$word"))
    elif [[ $COMP_CWORD -eq 2 && $first == verdict ]]; then
        COMPREPLY=($(compgen -W "@VERDICT@" -- "$word") $(compgen -f -- "$word"))
    elif [[ ${COMP_WORDS[COMP_CWORD-1]} == --to ]]; then
        COMPREPLY=($(compgen -W "@EXPORT@" -- "$word"))
    elif [[ " @WORDS@ " == *" $first "* && $word == -* ]]; then
        COMPREPLY=($(compgen -W "@COMMON@" -- "$word"))
    elif [[ $first == help ]]; then
        COMPREPLY=($(compgen -W "@WORDS@" -- "$word"))
    elif [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "@OPTIONS@" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}
complete -o filenames -F _haiprof haiprof
