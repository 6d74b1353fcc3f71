config_get() {
  grep "$2=" "$1" | cut -d= -f2
}
