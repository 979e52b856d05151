#!/bin/sh
# Run a .tflite file on an Android phone, on its CPU, GPU and NPU, and compare what it computes with the model.
#
#     LITERT=litert-latest examples/android/check.sh vit.tflite ViT-B/16 photos/*.jpg
#
# Up to ten of the images are used; without images, built-in patterns. The phone is connected, and `adb devices` lists it.
# LITERT is a folder with programs and libraries for android_arm64:
#
#   run_model, benchmark_model, libLiteRt.so          all
#   libLiteRtClGlAccelerator.so                       GPU
#   libLiteRtDispatch_Qualcomm.so, libLiteRtCompilerPlugin_Qualcomm.so
#                                                     Qualcomm's NPU, and libQnn*.so of Qualcomm's QAIRT SDK
#
# LiteRT's own command line downloads them from https://storage.googleapis.com/litert/binaries/VERSION/android_arm64/FILE,
# with "latest" as a VERSION; all of one version, because others may not fit. To build them:
#     bazel build -c opt --config=android_arm64 --copt=-DABSL_FLAGS_STRIP_NAMES=0 //litert/tools:run_model
# Libraries for an NPU: https://github.com/google-ai-edge/LiteRT/blob/main/litert/vendors/qualcomm/doc/HTP_INSTRUCTIONS.md
#
# Other variables: ACCELERATORS (default "cpu gpu npu"), OUT (a new folder for inputs and logs), ANDROID_SERIAL of adb.
# The exit code is 1 if an accelerator failed or differs too much from the model.
set -eu

if [ $# -lt 2 ] || [ ! -f "$1" ]; then
    echo "usage: LITERT=FOLDER $0 FILE.tflite MODEL [IMAGES...]" >&2
    exit 2
fi
file=$1 model=$2
shift 2
litert=${LITERT:?is the folder of the programs; the comment at the top of this script says where to get them}
out=${OUT:-phone-$(date +%Y%m%d-%H%M%S)}
there=/data/local/tmp/keras_vit
for program in run_model benchmark_model; do
    [ -f "$litert/$program" ] || { echo "There is no $litert/$program: the top of $0 says where to get it" >&2; exit 2; }
done

keras-vit verify "$file" "$model" "$@" --inputs "$out"
adb shell "rm -rf $there; mkdir -p $there"
adb push "$file" "$there/model.tflite"
adb push "$out/inputs" "$there/inputs"
for each in "$litert"/*; do adb push "$each" "$there/"; done
adb shell "chmod +x $there/run_model $there/benchmark_model"
property() { adb shell "getprop $1" | tr -d '\r\n'; }
{
    echo "$(property ro.product.manufacturer) $(property ro.product.model)"
    echo "$(property ro.soc.manufacturer) $(property ro.soc.model), Android $(property ro.build.version.release)"
    echo "LiteRT of $(basename "$litert"), run_model $(cksum <"$litert/run_model" | tr ' ' '/')"
} >"$out/device.txt"

failed=0
for accelerator in ${ACCELERATORS:-cpu gpu npu}; do
    echo "== $accelerator"
    use="--use_$accelerator=true" run="--accelerator=$accelerator"
    if [ "$accelerator" = npu ]; then # compiled on the phone in the first call
        use="$use --dispatch_library_path=$there --compiler_plugin_library_path=$there --compiler_cache_path=$there/cache"
        run="$run --dispatch_library_dir=$there --compiler_plugin_library_dir=$there --compiler_cache_dir=$there/cache"
    fi
    # run_model prints inputs too, which nobody reads: sed drops them.
    adb shell "cd $there && mkdir -p cache $accelerator && export LD_LIBRARY_PATH=$there ADSP_LIBRARY_PATH=$there
        ./benchmark_model --graph=model.tflite $use >log 2>&1; echo \"exit status \$?\" >>log; mv log $accelerator/benchmark.log
        for image in inputs/*; do
            ./run_model --graph=model.tflite $run --input_dir=\$image --print_tensors=true --compare_numerical=true \
                --sample_size=1000000000 >log 2>&1
            echo \"exit status \$?\" >>log
            sed '/Input buffer/,/Prepare output buffers/d' log >$accelerator/\${image##*/}.log
        done"
    adb pull "$there/$accelerator" "$out/"
    keras-vit verify "$file" "$model" --outputs "$out" --accelerator "$accelerator" || failed=1
done
adb shell "rm -rf $there"
exit $failed
