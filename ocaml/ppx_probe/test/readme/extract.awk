# Writes each code block of the README that follows a line <!-- file: NAME -->
# to example/NAME.
/^<!-- file: / { file = "example/" $3; next }
/^```/ { if (inside) { inside = 0; file = "" } else if (file != "") inside = 1; next }
inside { print > file }
