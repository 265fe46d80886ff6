# The bases: Debian minbase plus one language each, and the small one with numpy.
case "$TREE" in
base-small) make_base python3 python3-numpy ;;
base-gcc) make_base gcc g++ make libc6-dev ;;
base-go) make_base golang-go ;;
base-jdk) make_base openjdk-17-jdk-headless ;;
base-node) make_base nodejs ;;
base-python) make_base python3 python3-pip python3-setuptools python3-wheel python3-dev python3-venv python3-numpy ;;
esac
