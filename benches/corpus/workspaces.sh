# The workspaces: a real project each, with /workspace/run.sh that builds it and runs its tests
# without a network. The last step of each uses the toolkit, as an agent would.
case "$TREE" in
workspace-gcc)
    unpack_source zlib "$OUT/workspace/zlib"
    write_run <<'RUN'
cd /workspace/zlib
./configure --static
make -j2
make test
/opt/toolkit/bin/rg --count-matches deflate --glob '*.c' --sort path . | tail -n 3
RUN
    ;;
workspace-go)
    for package in golang-gopkg-yaml.v3-dev golang-gopkg-check.v1-dev golang-github-kr-pretty-dev golang-github-kr-text-dev \
        golang-github-rogpeppe-go-internal-dev golang-github-spf13-pflag-dev; do
        unpack_package "$package" "$OUT/unpacked"
    done
    mkdir -p "$OUT/workspace/go"
    mv "$OUT/unpacked/usr/share/gocode/src" "$OUT/workspace/go/src"
    rm -rf "$OUT/unpacked"
    write_run <<'RUN'
export GOPATH=/workspace/go GO111MODULE=off GOPROXY=off GOCACHE=/tmp/go-cache CGO_ENABLED=0
cd /workspace/go/src
echo "building with $(go version)"
go build gopkg.in/yaml.v3 github.com/spf13/pflag
go test -vet=off gopkg.in/yaml.v3 github.com/spf13/pflag >/tmp/tests || { cat /tmp/tests; exit 1; }
cut -f 1,2 /tmp/tests
/opt/toolkit/bin/rg --count-matches 'func Test' --sort path github.com/spf13/pflag | tail -n 3
RUN
    ;;
workspace-jdk)
    unpack_source libcommons-codec-java "$OUT/workspace/commons-codec"
    for package in junit4 libhamcrest-java libcommons-lang3-java; do unpack_package "$package" "$OUT/unpacked"; done
    mkdir -p "$OUT/workspace/lib"
    for jar in junit4 hamcrest commons-lang3; do cp -L "$OUT/unpacked/usr/share/java/$jar.jar" "$OUT/workspace/lib/"; done
    rm -rf "$OUT/unpacked"
    # Left out: the tests that run for many seconds or want gigabytes.
    write_run <<'RUN'
cd /workspace/commons-codec
libraries=/workspace/lib/junit4.jar:/workspace/lib/hamcrest.jar:/workspace/lib/commons-lang3.jar
echo "compiling commons-codec"
mkdir /tmp/classes /tmp/tests
find src/main/java -name '*.java' >/tmp/main
find src/test/java -name '*.java' >/tmp/test
javac -nowarn -encoding UTF-8 -d /tmp/classes @/tmp/main
jar -c -f /tmp/commons-codec.jar -C /tmp/classes . -C src/main/resources .
javac -nowarn -encoding UTF-8 -cp "/tmp/commons-codec.jar:$libraries" -d /tmp/tests @/tmp/test 2>/dev/null
tests=$(cd /tmp/tests && find org/apache/commons/codec/binary org/apache/commons/codec/net org/apache/commons/codec/language -name '*Test.class' |
    grep -v -e Abstract -e '\$' -e /bm/ -e /Base64Test -e /BaseNCodecTest | sed 's|\.class$||; s|/|.|g' | LC_ALL=C sort)
java -cp "/tmp/commons-codec.jar:/tmp/tests:src/test/resources:$libraries" org.junit.runner.JUnitCore $tests >/tmp/junit || { cat /tmp/junit; exit 1; }
grep '^OK' /tmp/junit
/opt/toolkit/bin/rg --count-matches @Test --sort path src/test | tail -n 3
RUN
    ;;
workspace-node)
    mkdir -p "$OUT/workspace"
    (cd "$downloads" && npm pack --silent qs@6.11.0 >/dev/null)
    tar -xzf "$downloads/qs-6.11.0.tgz" -C "$OUT/workspace" --no-same-owner
    mv "$OUT/workspace/package" "$OUT/workspace/qs"
    # What only publishing needs is left out; the rest of the project's tools are installed.
    (cd "$OUT/workspace/qs" && node -e '
        const fs = require("fs"), project = JSON.parse(fs.readFileSync("package.json"));
        for (const name of ["aud", "eclint", "evalmd", "in-publish", "npmignore", "safe-publish-latest"]) delete project.devDependencies[name];
        fs.writeFileSync("package.json", JSON.stringify(project, null, "\t") + "\n");')
    # The registry as it was on that day: the same versions whenever the corpus is made.
    (cd "$OUT/workspace/qs" && npm install --silent --no-audit --no-fund --ignore-scripts --before=2025-01-01 >"$OUT.log" 2>&1) ||
        { tail -n 20 "$OUT.log" >&2; exit 1; }
    rm -f "$OUT/workspace/qs/node_modules/.package-lock.json"
    write_run <<'RUN'
cd /workspace/qs
echo "bundling qs with node $(node --version)"
node node_modules/browserify/bin/cmd.js --standalone Qs lib/index.js >/tmp/qs.js
node node_modules/eslint/bin/eslint.js --ext=js lib test
node node_modules/tape/bin/tape 'test/**/*.js' | tail -n 5
node -p 'require("/tmp/qs.js").stringify({a: [1, 2]})'
/opt/toolkit/bin/jq -r .name package.json
RUN
    ;;
workspace-python)
    mkdir -p "$OUT/workspace/deps"
    (cd "$downloads" && pip download --quiet --no-deps --no-binary=click click==8.1.7)
    tar -xzf "$downloads/click-8.1.7.tar.gz" -C "$OUT/workspace" --no-same-owner
    mv "$OUT/workspace/click-8.1.7" "$OUT/workspace/click"
    pip install --quiet --root-user-action=ignore --no-compile --only-binary=:all: --python-version 3.11 --implementation cp --target "$OUT/workspace/deps" \
        pytest==8.3.4 pluggy==1.5.0 iniconfig==2.0.0 packaging==24.2 pygments==2.18.0
    write_run <<'RUN'
cd /workspace/click
echo "building the wheel with $(python3 --version)"
pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir /tmp/wheel .
ls /tmp/wheel
PYTHONPATH=/workspace/deps:src python3 -m pytest -q -p no:cacheprovider tests | tail -n 1 | sed 's/ in .*//'
/opt/toolkit/bin/rg --count-matches 'def test_' --sort path tests | tail -n 3
RUN
    ;;
esac
clamp_times
