/* Runs a SavedModel by TensorFlow's C++ loader, the one that TensorFlow Serving has, without Python.
 *
 *   savedmodel_run FOLDER FEED DTYPE RANK SIDE... FILE FETCH...
 *
 * FEED and FETCH are OPERATION:INDEX. FILE holds the values of the input: numbers as they are in memory (DTYPE float or
 * uint8), or for DTYPE string each value behind its length in eight bytes. Every FETCH is printed as a line: dtype,
 * rank, sides, then the bytes in hexadecimal, strings with a comma behind each. An error of the model is printed as
 * "code N message" and ends it with status 3.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensorflow/c/c_api.h"
#include "tensorflow/c/tf_tstring.h"

static TF_Status *status;

static void check(const char *what) {
  if (TF_GetCode(status) == TF_OK) return;
  printf("code %d %s: %s\n", TF_GetCode(status), what, TF_Message(status));
  exit(3);
}

static TF_Output output(TF_Graph *graph, char *name) {
  char *colon = strrchr(name, ':');
  *colon = 0;
  TF_Output found = {TF_GraphOperationByName(graph, name), atoi(colon + 1)};
  if (!found.oper) {
    printf("code 5 no operation %s\n", name);
    exit(3);
  }
  return found;
}

static TF_Tensor *read_strings(const char *path, const int64_t *sides, int rank) {
  TF_Tensor *tensor = TF_AllocateTensor(TF_STRING, sides, rank, sides[0] * sizeof(TF_TString));
  TF_TString *strings = TF_TensorData(tensor);
  FILE *file = fopen(path, "rb");
  for (int64_t i = 0; i < sides[0]; i++) {
    uint64_t length = 0;
    if (fread(&length, 8, 1, file) != 1) exit(4);
    char *bytes = malloc(length + 1);
    if (fread(bytes, 1, length, file) != length) exit(4);
    TF_TString_Init(&strings[i]);
    TF_TString_Copy(&strings[i], bytes, length);
    free(bytes);
  }
  fclose(file);
  return tensor;
}

static TF_Tensor *read_numbers(const char *path, TF_DataType dtype, const int64_t *sides, int rank) {
  size_t size = TF_DataTypeSize(dtype);
  for (int i = 0; i < rank; i++) size *= sides[i];
  TF_Tensor *tensor = TF_AllocateTensor(dtype, sides, rank, size);
  FILE *file = fopen(path, "rb");
  if (fread(TF_TensorData(tensor), 1, size, file) != size) exit(4);
  fclose(file);
  return tensor;
}

static void print_bytes(const unsigned char *bytes, size_t size) {
  for (size_t i = 0; i < size; i++) printf("%02x", bytes[i]);
}

static void print(TF_Tensor *tensor) {
  int64_t count = 1;
  printf("%d %d", TF_TensorType(tensor), TF_NumDims(tensor));
  for (int i = 0; i < TF_NumDims(tensor); i++) {
    printf(" %" PRId64, TF_Dim(tensor, i));
    count *= TF_Dim(tensor, i);
  }
  printf(" ");
  if (TF_TensorType(tensor) == TF_STRING) {
    TF_TString *strings = TF_TensorData(tensor);
    for (int64_t i = 0; i < count; i++) {
      print_bytes((const unsigned char *)TF_TString_GetDataPointer(&strings[i]), TF_TString_GetSize(&strings[i]));
      printf(",");
    }
  } else {
    print_bytes(TF_TensorData(tensor), TF_TensorByteSize(tensor));
  }
  printf("\n");
}

int main(int count, char **words) {
  status = TF_NewStatus();
  const char *tags[] = {"serve"};
  TF_Graph *graph = TF_NewGraph();
  TF_Session *session = TF_LoadSessionFromSavedModel(TF_NewSessionOptions(), NULL, words[1], tags, 1, graph, NULL, status);
  check("loading");
  TF_Output feed = output(graph, words[2]);
  int rank = atoi(words[4]), next = 5 + rank, fetches = count - next - 1;
  int64_t sides[8];
  for (int i = 0; i < rank; i++) sides[i] = atoll(words[5 + i]);
  TF_Tensor *input = !strcmp(words[3], "string") ? read_strings(words[next], sides, rank)
                     : read_numbers(words[next], !strcmp(words[3], "uint8") ? TF_UINT8 : TF_FLOAT, sides, rank);
  TF_Output *wanted = malloc(fetches * sizeof(TF_Output));
  TF_Tensor **found = calloc(fetches, sizeof(TF_Tensor *));
  for (int i = 0; i < fetches; i++) wanted[i] = output(graph, words[next + 1 + i]);
  TF_SessionRun(session, NULL, &feed, &input, 1, wanted, found, fetches, NULL, 0, NULL, status);
  check("running");
  for (int i = 0; i < fetches; i++) print(found[i]);
  return 0;
}
